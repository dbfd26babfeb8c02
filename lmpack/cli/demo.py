"""lmpack demo: the four jobs on the embedded demo model, as a user would type them."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import click

from lmpack.cli.fresh_process import run_fresh
from lmpack.cli.path_argument import NewPath
from lmpack.errors import UsageError

DEMO = Path(__file__).parents[1] / "demo"
GGUF = DEMO / "tiny-Q4_K_M.gguf"
PROMPTS = DEMO / "prompts.jsonl"
PACK = "demo.lmpack"
HALF_RAM = "432MiB"  # room for half of the demo model's experts, beside what every run needs


@click.command(
    epilog="""Examples:

\b
  lmpack demo
  lmpack demo --keep demo-files
"""
)
@click.option(
    "--keep",
    type=NewPath(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Leave the pack and the profile in DIR. Default: a temporary folder, removed at the end.",
)
@click.pass_context
def command(ctx: click.Context, keep: Path | None) -> None:
    """Convert, validate, profile and run the demo model that comes with lmpack."""
    if keep is not None:
        pack = keep / PACK
        if pack.exists():
            raise UsageError(f"{pack}: exists; choose another folder, or delete it first")
        keep.mkdir(parents=True, exist_ok=True)
        exit_code = _run_steps(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="lmpack-demo-") as folder:
            exit_code = _run_steps(Path(folder))
    ctx.exit(exit_code)


def _run_steps(folder: Path) -> int:
    """Run the steps one after the other, up to the first that fails; return its exit code."""
    steps = _steps(folder)
    for number, (title, args) in enumerate(steps, start=1):
        click.secho(f"\n[{number}/{len(steps)}] {title}", bold=True)
        click.echo(f"$ {shlex.join(['lmpack', *args])}")
        exit_code, _ = run_fresh(args)
        if exit_code:
            return exit_code
    return 0


def _steps(folder: Path) -> list[tuple[str, list[str]]]:
    """What to do: a title and a command line each."""
    pack = str(folder / PACK)
    profile = str(folder / "demo.profile.safetensors")
    story = ["run", pack, "-p", "Once upon a time there was a small fox who", "-n", "120", "--stats"]
    question = ["run", pack, "--chat", "-p", "What is the capital of France?"]
    profiled = ["profile", pack, "--prompts", str(PROMPTS), "-n", "16", "-o", profile]
    return [
        ("Convert: one file per expert, and a manifest", ["convert", str(GGUF), pack]),
        ("Validate: every size and every checksum", ["validate", pack]),
        ("Profile: which experts do twelve prompts use?", profiled),
        ("Run: a story, with all experts in memory", story),
        ("Run: the same story, with half of them: fewer hits, the same words", [*story, "--ram", HALF_RAM]),
        ("Run: a question", question),
    ]
