"""lmpack demo: the four jobs on the embedded demo model, as a user would type them."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import click

from lmpack.cli.main import run

DEMO = Path(__file__).parents[1] / "demo"
GGUF = DEMO / "tiny-Q4_K_M.gguf"
PROMPTS = DEMO / "prompts.jsonl"


@click.command(
    epilog="""Examples:

\b
  lmpack demo
  lmpack demo --keep demo-files
"""
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Leave the pack and the profile in DIR. Default: a temporary folder, removed at the end.",
)
@click.pass_context
def command(ctx: click.Context, keep: Path | None) -> None:
    """Convert, validate, profile and run the demo model that comes with lmpack."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        exit_code = _run_steps(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="lmpack-demo-") as folder:
            exit_code = _run_steps(Path(folder))
    ctx.exit(exit_code)


def _run_steps(folder: Path) -> int:
    """Run each step's command line in this process, up to the first that fails; return its exit code."""
    steps = _steps(folder)
    for number, (title, args) in enumerate(steps, start=1):
        click.secho(f"\n[{number}/{len(steps)}] {title}", bold=True)
        click.echo(f"$ {shlex.join(['lmpack', *args])}")
        exit_code = run(args)
        if exit_code:
            return exit_code
    return 0


def _steps(folder: Path) -> list[tuple[str, list[str]]]:
    pack = str(folder / "demo.lmpack")
    profile = str(folder / "demo.profile.safetensors")
    story = "Once upon a time there was a small fox who"
    return [
        ("Convert: one file per expert, and a manifest", ["convert", str(GGUF), pack]),
        ("Validate: every size and every checksum", ["validate", pack]),
        (
            "Profile: which experts do twelve prompts use?",
            ["profile", pack, "--prompts", str(PROMPTS), "-n", "16", "-o", profile],
        ),
        ("Run: a story", ["run", pack, "-p", story, "-n", "160", "--stats"]),
        ("Run: a question", ["run", pack, "--chat", "-p", "What is the capital of France?"]),
    ]
