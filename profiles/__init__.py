"""WHICH EXPERTS A WORKLOAD USES: recorder, trace, profile, cache policies."""
