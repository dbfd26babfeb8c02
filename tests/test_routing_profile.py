"""Profiles add up, compare, survive their file, and refuse what contradicts itself."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmpack.errors import ProfileError, StorageError
from lmpack.expert_key import ExpertKey
from profiles.routing_origin import RoutingOrigin
from profiles.routing_profile import RoutingProfile
from profiles.routing_shape import RoutingShape
from profiles.routing_skew import Coverage, LayerSkew, RoutingSkew
from profiles.routing_trace import RoutingTrace
from tests.tiny_routing import ORIGIN, SHAPE, record

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


@pytest.fixture
def profile() -> RoutingProfile:
    return record([[6, 1, 1], [4, 1]], seed=1).profile(ORIGIN)


@pytest.fixture
def saved(profile: RoutingProfile, tmp_path: Path) -> Path:
    path = tmp_path / "p.safetensors"
    profile.save(path)
    return path


def test_a_profile_made_from_a_trace_equals_the_recorded_one() -> None:
    recorder = record([[6, 1, 1], [4, 1], [3]], seed=2)
    assert RoutingProfile.from_trace(recorder.trace(ORIGIN)) == recorder.profile(ORIGIN)


def test_a_profile_survives_its_file(profile: RoutingProfile, saved: Path) -> None:
    assert RoutingProfile.load(saved) == profile
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_equal_profiles_are_equal_files(profile: RoutingProfile, saved: Path) -> None:
    again = saved.with_name("again.safetensors")
    RoutingProfile.load(saved).save(again)
    assert again.read_bytes() == saved.read_bytes()


def test_a_model_of_one_moe_layer_has_no_transitions(tmp_path: Path) -> None:
    single = record([[3]], shape=RoutingShape((0,), (4,), 2)).profile(ORIGIN)
    assert single.transitions.shape == (0, 4, 4)
    single.save(tmp_path / "p.safetensors")
    assert RoutingProfile.load(tmp_path / "p.safetensors") == single


def test_merged_profiles_have_the_sums_of_both(profile: RoutingProfile) -> None:
    elsewhere = RoutingOrigin("tinymoe", ("dd" * 32,), ORIGIN.tokenizers_sha256, ("ee" * 32,))
    other = record([[9]], seed=3).profile(elsewhere)
    merged = profile.merge(other)
    assert np.array_equal(merged.counts, profile.counts + other.counts)
    assert np.array_equal(merged.transitions, profile.transitions + other.transitions)
    assert (merged.num_tokens, merged.num_prompt_tokens) == (22, 19)
    assert merged.origin == RoutingOrigin(
        "tinymoe", ("aa" * 32, "dd" * 32), ("bb" * 32,), ("cc" * 32, "ee" * 32)
    )


def test_merging_prompt_by_prompt_equals_recording_all_at_once() -> None:
    whole = record([[6, 1], [4]]).profile(ORIGIN)
    first = record([[6, 1]]).profile(ORIGIN)
    both = record([[6, 1], [4]]).trace(ORIGIN)
    second = RoutingProfile.from_trace(
        RoutingTrace(
            SHAPE,
            ORIGIN,
            both.topk_ids[7:],
            both.topk_weights[7:],
            both.token_ids[7:],
            both.prompt_offsets[1:] - 7,
            both.prompt_lengths[1:],
            both.chunk_offsets[2:] - 7,
        )
    )
    assert first.merge(second) == whole


def test_profiles_of_different_models_are_not_merged_and_the_difference_is_named(
    profile: RoutingProfile,
) -> None:
    other_shape = RoutingShape((1, 2, 4), (6, 4, 6), 2)
    other = record([[3]], shape=other_shape).profile(replace(ORIGIN, architecture="othermoe"))
    expected = r"architecture tinymoe and othermoe; num_experts \[6, 4, 5\] \(3\) and \[6, 4, 6\] \(3\)"
    with pytest.raises(ProfileError, match=f"cannot be merged: {expected}"):
        profile.merge(other)
    with pytest.raises(ProfileError, match=f"cannot be compared: {expected}"):
        profile.divergence(other)


def profile_of_counts(*counts: list[int], top_k: int = 1) -> RoutingProfile:
    """A profile with these counts per layer, as if choices of two layers had nothing to do with each other."""
    array = np.array(counts, np.int64)
    num_tokens = int(array[0].sum()) // top_k
    transitions = np.zeros((len(counts) - 1, array.shape[1], array.shape[1]), np.int64)
    for index, matrix in enumerate(transitions):
        sources = np.repeat(np.arange(array.shape[1]), array[index])
        targets = np.repeat(np.arange(array.shape[1]), array[index + 1])
        np.add.at(matrix, (sources, targets), 1)
    shape = RoutingShape(tuple(range(len(counts))), (array.shape[1],) * len(counts), top_k)
    return RoutingProfile(shape, ORIGIN, array, transitions, num_tokens, num_tokens)


def test_divergence_is_zero_for_equal_and_one_bit_for_disjoint_choices() -> None:
    one = profile_of_counts([4, 4, 0, 0], [8, 0, 0, 0])
    other = profile_of_counts([0, 0, 4, 4], [8, 0, 0, 0])
    assert one.divergence(other).tolist() == [1.0, 0.0]
    assert other.divergence(one).tolist() == [1.0, 0.0]


def test_divergence_agrees_with_its_definition_and_ignores_the_number_of_tokens() -> None:
    one, other = profile_of_counts([1, 3, 0, 4]), profile_of_counts([40, 20, 20, 0])
    middle = (np.array([1, 3, 0, 4]) / 8 + np.array([40, 20, 20, 0]) / 80) / 2
    entropies = [
        -sum(p * np.log2(p) for p in row if p) for row in (middle, [1 / 8, 3 / 8, 1 / 2], [0.5, 0.25, 0.25])
    ]
    assert one.divergence(other) == pytest.approx([entropies[0] - (entropies[1] + entropies[2]) / 2])


def test_a_profile_without_tokens_cannot_be_compared(profile: RoutingProfile) -> None:
    with pytest.raises(ProfileError, match="no tokens"):
        profile.divergence(record([]).profile(ORIGIN))


def test_skew_of_counts_worked_out_by_hand() -> None:
    skew = LayerSkew.of_counts(7, np.array([8, 0, 4, 4], np.int64))
    assert skew == LayerSkew(
        layer=7,
        num_experts=4,
        busiest_expert=0,
        busiest_to_mean=2.0,
        entropy_bits=1.5,
        gini=0.375,
        never_chosen=(1,),
        coverage=(Coverage(10, 1, 0.5), Coverage(25, 1, 0.5), Coverage(50, 2, 0.75)),
    )


def test_an_even_layer_has_no_skew() -> None:
    skew = LayerSkew.of_counts(0, np.full(8, 5, np.int64))
    assert (skew.busiest_to_mean, skew.entropy_bits) == (1.0, 3.0)
    assert skew.gini == pytest.approx(0)
    assert [entry.share for entry in skew.coverage] == [1 / 8, 2 / 8, 4 / 8]


def test_figures_of_a_layer_without_choices_are_zero() -> None:
    skew = LayerSkew.of_counts(0, np.zeros(4, np.int64))
    assert (skew.busiest_to_mean, skew.entropy_bits, skew.gini) == (0.0, 0.0, 0.0)
    assert skew.never_chosen == (0, 1, 2, 3)
    assert [entry.share for entry in skew.coverage] == [0.0, 0.0, 0.0]


def test_padding_is_no_expert(profile: RoutingProfile) -> None:
    skew = RoutingSkew.of_profile(profile)
    assert [layer.num_experts for layer in skew.layers] == [6, 4, 5]
    assert all(max(layer.never_chosen, default=0) < layer.num_experts for layer in skew.layers)
    assert skew.coverage[2].num_experts == 8  # half of 6 + 4 + 5, rounded up


def changed(array: NDArray[np.int64], at: Any, value: int) -> NDArray[np.int64]:
    copy = array.copy()
    copy[at] = value
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda p: {"counts": changed(p.counts, (0, 0), -1)}, "counts: expected 0 to num_tokens, 13, got -1"),
        (lambda p: {"counts": changed(p.counts, (0, 0), 14)}, "counts: expected 0 to num_tokens"),
        (lambda p: {"counts": changed(p.counts, (1, 5), 1)}, "a cell beyond a layer's num_experts is not 0"),
        (lambda p: {"counts": p.counts[:, :5]}, r"counts: expected int64 \[3, 6\], got int64 \[3, 5\]"),
        (lambda p: {"counts": p.counts.astype(np.int32)}, "got int32"),
        (lambda p: {"num_tokens": p.num_tokens + 1}, "counts: sums do not agree"),
        (lambda p: {"num_prompt_tokens": 14}, "num_prompt_tokens: expected 0 to num_tokens, 13, got 14"),
        (lambda p: {"transitions": p.transitions[:1]}, r"transitions: expected int64 \[2, 6, 6\]"),
        (lambda p: {"transitions": p.transitions.transpose(0, 2, 1)}, "transitions: sums do not agree"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    profile: RoutingProfile, changes: Any, message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        replace(profile, **changes(profile))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (), 1), "layers: expected 1 to"),
        (((2, 1), (4, 4), 1), "ascending"),
        (((1, 1), (4, 4), 1), "ascending"),
        (((-1, 1), (4, 4), 1), "expected numbers from 0"),
        (((1, 2), (4,), 1), "num_experts: expected 2 numbers"),
        (((1, 2), (4, 4), 0), "top_k: expected 1"),
        (((1, 2), (4, 1), 2), "layer 2 has 1, expected 2"),
        (((1, 2), (4, 40_000), 2), "layer 2 has 40000"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        RoutingShape(*arguments)


def rewritten(path: Path, change: Any) -> Path:
    """The file with its metadata changed."""
    header_nbytes = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_nbytes])
    document = json.loads(header["__metadata__"]["lmpack"])
    change(document)
    save_file(load_file(path), path, metadata={"lmpack": json.dumps(document)})
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "version 2 is not known, this lmpack reads version 1"),
        (lambda d: d.update(version=True), "version: expected a whole number"),
        (lambda d: d.update(kind="routing_trace"), "expected the kind routing_profile, got 'routing_trace'"),
        (lambda d: d.update(extra=1), "has unknown 'extra'"),
        (lambda d: d.pop("top_k"), "misses top_k"),
        (lambda d: d.update(pack_ids=["xyz"]), "pack_ids: expected 64 lower-case hex digits"),
        (lambda d: d.update(num_tokens=2**41), "num_tokens: expected a whole number"),
        (lambda d: d.update(num_tokens=12), "p.safetensors: counts: expected 0 to|sums do not agree"),
        (lambda d: d.update(num_experts=[7, 4, 5]), r"tensor counts is I64 \[3, 6\], the metadata asks for"),
        (lambda d: d.update(layers=[1, 2, 2]), "ascending"),
        (lambda d: d.update(architecture=""), "architecture: expected a printable string"),
    ],
)
def test_metadata_that_is_wrong_is_refused_and_the_file_named(saved: Path, change: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        RoutingProfile.load(rewritten(saved, change))
    assert str(caught.value).startswith(f"{saved}: ")


def test_a_file_of_other_tensors_is_refused(saved: Path) -> None:
    with pytest.raises(ProfileError, match="expected the kind routing_trace"):
        RoutingTrace.load(saved)
    with saved.open("rb") as file:
        header = json.loads(file.read(8 + int.from_bytes(file.read(8), "little"))[:-8].decode().rstrip())
    save_file({"counts": load_file(saved)["counts"]}, saved, metadata=header["__metadata__"])
    with pytest.raises(ProfileError, match="expected the tensors counts, transitions, got counts"):
        RoutingProfile.load(saved)


def test_a_safetensors_file_of_someone_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"counts": np.zeros(3)}, path)
    with pytest.raises(ProfileError, match=r"not one of lmpack's routing profiles"):
        RoutingProfile.load(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.safetensors")
    with pytest.raises(
        ProfileError, match=r"p\.safetensors: not a regular file; name a file that lmpack profile"
    ):
        RoutingProfile.load(tmp_path / "p.safetensors")


@pytest.mark.parametrize("nbytes", [0, 7, 100, -1])
def test_a_file_cut_short_is_refused(saved: Path, nbytes: int) -> None:
    saved.write_bytes(saved.read_bytes()[:nbytes])
    with pytest.raises(ProfileError, match=r"p\.safetensors: not a safetensors file, or cut short"):
        RoutingProfile.load(saved)


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RoutingProfile.load(tmp_path / "none.safetensors")


def test_a_profile_that_cannot_be_written_leaves_nothing_behind(
    profile: RoutingProfile, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="folder"):
        profile.save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


def test_others_may_read_a_profile_as_the_umask_says(saved: Path) -> None:
    saved.with_name("plain").write_bytes(b"")
    assert saved.stat().st_mode == saved.with_name("plain").stat().st_mode


def test_a_file_with_one_byte_inverted_is_refused(saved: Path) -> None:
    raw = saved.read_bytes()
    for position in range(0, len(raw), 5):
        saved.write_bytes(raw[:position] + bytes([raw[position] ^ 0xFF]) + raw[position + 1 :])
        with pytest.raises(ProfileError):
            RoutingProfile.load(saved)


def test_the_most_used_come_first_among_equals_in_file_order_and_the_unused_not_at_all() -> None:
    profile = record([[4, 1]]).profile(ORIGIN)
    order = profile.most_used()
    counts = {
        ExpertKey(layer, expert): int(count)
        for index, layer in enumerate(SHAPE.layers)
        for expert, count in enumerate(profile.layer_counts(index))
    }
    assert order == sorted((key for key in counts if counts[key]), key=lambda key: (-counts[key], key))
    assert record([]).profile(ORIGIN).most_used() == []
