"""The command line as a whole: help, errors, exit codes, and what it does not load."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import lmpack
from lmpack.cli.main import COMMANDS, cli, run
from lmpack.cli.path_argument import PackPath

REPOSITORY = Path(__file__).parents[1]
LMPACK = [sys.executable, "-m", "lmpack"]

# A signal comes when the command opens one of its files, or begins another process, or torch imports a module, or in a
# destructor when the manifest is read, or in a function.
TOLD_TO_END = """
import os, signal, sys
from lmpack.cli.main import main

ending, moment = int(sys.argv[1]), sys.argv[2]
once = iter([os.getpid()])

def end():
    for process in once:
        os.kill(process, ending)

class Destroyed:
    def __del__(self):
        end()

def tell(event, args):
    what = str(args[0]) if args else ""
    if event == "open" and moment == "destructor" and what.endswith("manifest.json"):
        Destroyed()
    elif event == moment or event == "open" and what.endswith(moment):
        end()
    elif event == "import" and what == moment and "torch" in sys.modules:
        end()

def trace(frame, event, arg):
    if frame.f_code.co_name == moment:
        end()

signal.signal(ending, signal.default_int_handler if ending == signal.SIGINT else signal.SIG_DFL)
sys.addaudithook(tell)
sys.settrace(trace)
sys.argv[1:] = sys.argv[3:]
main()
"""


def command_named(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def readme_command_lines() -> list[list[str]]:
    """The words of every `lmpack ...` line in README's code blocks."""
    blocks = re.findall(
        r"^```\w*\n(.*?)^```", (REPOSITORY / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("lmpack ")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    last_line = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert f"lmpack {name}" in last_line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    options = [param for param in command_named(name).params if isinstance(param, click.Option)]
    assert not [option.opts for option in options if not option.help]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_called_a_pack_is_checked_to_be_one(name: str) -> None:
    packs = [param for param in command_named(name).params if param.name == "pack"]
    assert all(isinstance(param.type, PackPath) for param in packs)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_is_given_has_a_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    may_be_empty = {"-p", "--prompt", "--system"}  # a text
    for option in command_named(name).params:
        if isinstance(option, click.Option) and not option.is_flag and may_be_empty.isdisjoint(option.opts):
            assert run([name, option.opts[-1], ""]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert option.opts[-1] in line


@pytest.mark.parametrize("long", ["x" * 300, f"{'x' * 300}/y", "y/" * 3000], ids=["name", "folder", "path"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_that_is_too_long_is_called_that(name: str, long: str) -> None:
    for param in command_named(name).params:
        if isinstance(param.type, click.Path):
            with pytest.raises(
                click.BadParameter, match="the name is too long for this file system; choose a"
            ):
                param.type.convert(long, param, None)


def test_the_list_of_commands_shows_each_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [
        line.split()[0] for line in shown.split("Commands:")[1].splitlines()[1 : 1 + len(COMMANDS)]
    ] == list(COMMANDS)


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_the_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"lmpack {lmpack.__version__}\n"


@pytest.mark.parametrize(
    "args",
    [
        ["frobnicate"],
        ["--frobnicate"],
        ["validate"],
        ["validate", "--frobnicate", "m.lmpack"],
        ["run", "no-such-pack.lmpack", "-p", "x"],
        ["convert", "one", "two", "three"],
    ],
    ids=shlex.join,
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert re.fullmatch(r"lmpack: error: .+ \(see: lmpack.* --help\)\n", shown.err)


def test_a_broken_input_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(2))
    assert run(["convert", str(broken), str(tmp_path / "broken.lmpack")]) == 1
    shown = capsys.readouterr()
    assert not shown.out
    assert re.fullmatch(r"lmpack: error: .*broken\.gguf.*\n", shown.err)


def test_an_error_cannot_send_control_codes_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = tmp_path / "\x1b[2Jred\nherring.gguf"
    nasty.write_bytes(b"not a model")
    assert run(["convert", str(nasty), str(tmp_path / "out.lmpack")]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("lmpack: error: ")
    assert "\x1b" not in shown
    assert shown.count("\n") == 1


def test_a_shell_completes_commands_and_options() -> None:
    asked = {"_LMPACK_COMPLETE": "bash_complete", "COMP_WORDS": "lmpack val", "COMP_CWORD": "1"}
    ended = subprocess.run(LMPACK, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert ended.stdout == "plain,validate\n"


def test_a_current_folder_that_was_deleted_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = 'rmdir "$PWD"; exec "$@"'
    ended = subprocess.run(
        ["sh", "-c", script, "sh", *LMPACK, "--version"],
        cwd=tmp_path / "gone",
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == "lmpack: error: the current folder has been deleted; change to another one\n"


def test_ctrl_c_ends_with_exit_code_130_and_no_traceback() -> None:
    # A shell's background job ignores SIGINT, and so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([*LMPACK, "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        while "[1/" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("ending", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize(
    ("args", "moment"),
    [
        ("demo", "subprocess.Popen"),
        ("run {pack} -p x -n 4000 --ignore-eos", "destructor"),  # Python ignores what is raised there
        ("--version", "leave"),
        ("run {pack} -p x", "numpy"),  # torch ignores that it could not be imported
        ("export {pack} {work}/out", "out/tiny-Q4_K_M.gguf.partial"),
        ("convert {gguf} {work}/out --reference", "out.partial/journal"),
    ],
)
def test_a_command_that_is_told_to_end_takes_its_unfinished_files_away(
    demo_gguf: Path, demo_pack: Path, tmp_path: Path, args: str, moment: str, ending: int, exit_code: int
) -> None:
    words = [word.format(pack=demo_pack, gguf=demo_gguf, work=tmp_path) for word in args.split()]
    told = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END, str(ending), moment, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    assert told.returncode == exit_code
    assert "Traceback" not in told.stderr
    assert {path.name for path in tmp_path.rglob("*")} <= {"out"}  # the folder of an export


@pytest.mark.parametrize(
    ("ending", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_conversion_that_is_told_to_end_says_what_goes_on_with_it(
    demo_gguf: Path, tmp_path: Path, ending: int, exit_code: int
) -> None:
    command = ["convert", str(demo_gguf), str(tmp_path / "m.lmpack")]
    told = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END, str(ending), "m.lmpack.partial/journal", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == exit_code
    assert told.stderr.rstrip() == (
        f"lmpack: interrupted; the same command with --resume goes on from what is in {tmp_path}/m.lmpack.partial"
    )
    assert run([*command, "--resume"]) == 0


@pytest.mark.parametrize(
    ("command", "moment", "advice"),
    [
        ("export", "out/tiny-Q4_K_M.gguf.partial", "what has its name in {out} is whole"),
        ("unpack", "out.partial/shared.bin", "nothing of it is kept"),
    ],
)
def test_a_command_that_is_told_to_end_says_what_becomes_of_its_work(
    demo_gguf: Path, tmp_path: Path, command: str, moment: str, advice: str
) -> None:
    pack, out = tmp_path / "reference", tmp_path / "out"
    assert run(["convert", str(demo_gguf), str(pack), "--reference"]) == 0
    told = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END, str(signal.SIGTERM), moment, command, str(pack), str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 143
    assert told.stderr.rstrip() == f"lmpack: interrupted; {advice.format(out=out)}"


def test_help_loads_neither_torch_nor_numpy() -> None:
    script = (
        "import sys; from lmpack.cli.main import run; run(['--help']);"
        "sys.exit(str({'torch', 'numpy', 'tokenizers', 'gguf'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == "set()"


def test_the_help_of_no_command_loads_torch() -> None:
    script = (
        "import sys; from lmpack.cli.main import COMMANDS, run;"
        "codes = [run([name, '--help']) for name in COMMANDS];"
        "sys.exit('torch was loaded' if 'torch' in sys.modules else max(codes))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_importing_lmpack_loads_neither_torch_nor_numpy() -> None:
    script = "import sys, lmpack; sys.exit(str({'torch', 'numpy', 'click'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == "set()"


def test_load_opens_an_engine(demo_pack: Path) -> None:
    with lmpack.load(demo_pack, num_threads=1, context_length=16) as engine:
        assert engine.plan.pack.manifest.architecture == "qwen3moe"


def test_readme_names_every_command() -> None:
    named = {words[1] for words in readme_command_lines()}
    assert named >= set(COMMANDS)


@pytest.mark.parametrize("words", readme_command_lines(), ids=shlex.join)
def test_readme_uses_only_commands_and_flags_that_exist(words: list[str]) -> None:
    name, *rest = words[1:]
    command = cli if name.startswith("-") else command_named(name)
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    used = {word.split("=")[0] for word in [name, *rest] if re.match(r"--?[a-z]", word)}
    assert used <= known | {"-h", "--help"}
