"""The engine on a device with memory of its own: the twin of one everywhere, a GPU where there is one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner

from lmpack.cli import run
from lmpack.errors import BudgetError, UnsupportedError, UsageError
from runtime.engine import Engine
from runtime.sampler import SamplingParams
from tests.greedy_logits import PROMPT, greedy_logits
from tests.smallest_budget import smallest_budget

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def load(pack: Path, device: str = "twin", **options: Any) -> Engine:
    return Engine.load(pack, device=device, context_length=128, **options)


@pytest.fixture(scope="module")
def reference(demo_pack: Path) -> torch.Tensor:
    with load(demo_pack, "cpu", kernels="torch") as engine:
        return greedy_logits(engine, 4)


@pytest.mark.parametrize(
    ("vram_extra", "ram_extra"), [(0, 0), (4 * MIB, 0), (0, 1 << 30), (4 * MIB, 6 * MIB)]
)
def test_any_split_gives_the_bits_of_the_processor_alone(
    demo_pack: Path, reference: torch.Tensor, vram_extra: int, ram_extra: int
) -> None:
    vram = smallest_budget(lambda: load(demo_pack, vram=1)) + vram_extra
    ram = smallest_budget(lambda: load(demo_pack, vram=vram, ram=1)) + ram_extra
    with load(demo_pack, vram=vram, ram=ram) as engine:
        assert torch.equal(greedy_logits(engine, 4), reference)
        stats = engine.stats()
    assert stats.evictions > 0
    assert stats.ram_tier_nbytes >= 4 * engine.budget.layouts[0].stride
    experts = sum(layout.nbytes for layout in engine.budget.layouts)
    if ram_extra == 1 << 30:  # each expert comes from the drive once
        assert stats.bytes_read <= experts
        assert stats.ram_hits > 0


def test_a_budget_below_the_smallest_names_its_option_and_the_smallest(demo_pack: Path) -> None:
    vram = smallest_budget(lambda: load(demo_pack, vram=1))
    with pytest.raises(BudgetError, match=rf"device memory budget.*--vram \d+MiB.* {vram} bytes"):
        load(demo_pack, vram=vram - 1)
    ram = smallest_budget(lambda: load(demo_pack, vram=vram, ram=1))
    with pytest.raises(BudgetError, match=rf"the memory budget.*--ram \d+MiB or more; .* {ram} bytes"):
        load(demo_pack, vram=vram, ram=ram - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "vram": MIB}, "--vram is the memory of a GPU"),
        ({"kernels": "ggml"}, "ggml kernels run on the CPU alone"),
        ({"io": "mmap"}, "use --io direct or auto"),
        ({"device": "tpu"}, "no device is called 'tpu'; expected cpu, cuda"),
        ({"device": "cuda:x"}, "no device is called 'cuda:x'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    demo_pack: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load(demo_pack, **options)


def test_a_gpu_that_is_not_there_is_said(demo_pack: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"device cuda:99: torch \S+ finds \d+ GPUs here; use --device cpu"
    ):
        load(demo_pack, "cuda:99")


def test_a_run_says_what_each_tier_holds_and_answered(demo_pack: Path) -> None:
    options = ["--device", "twin", "--vram", "40MiB", "--ram", "900MiB", "--context", "128"]
    command = [str(demo_pack), "-p", PROMPT, "-n", "3", "--stats", "--json", *options]
    result = CliRunner().invoke(run.command, command)
    assert result.exit_code == 0, result.output
    assert re.search(r"twin budget 40.0 MiB: dense .*; RAM budget 900.0 MiB: buffers", result.stderr)
    assert re.search(r"ran .* on torch kernels, \d+ threads?, device twin", result.stderr)
    assert re.search(
        r"memory .*40.0 MiB device budget, .*; RAM 900.0 MiB, [\d.]+ MiB for others", result.stderr
    )
    stats = json.loads(result.stdout)["stats"]
    assert (stats["device"], stats["vram_nbytes"], stats["ram_nbytes"]) == ("twin", 40 * MIB, 900 * MIB)
    assert f"{stats['ram_hits']} from the RAM tier" in result.stderr


def test_the_twin_is_in_no_help_text() -> None:
    assert "twin" not in CliRunner().invoke(run.command, ["--help"]).output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("vram_extra", [0, 4 * MIB, 1 << 30])
def test_a_gpu_continues_as_the_processor_does(
    demo_pack: Path, reference: torch.Tensor, vram_extra: int
) -> None:
    vram = smallest_budget(lambda: load(demo_pack, "cuda", vram=1)) + vram_extra
    with load(demo_pack, "cuda", vram=vram) as engine:
        torch.testing.assert_close(greedy_logits(engine, 4), reference, atol=2e-2, rtol=0)
        ids = engine.tokenizer.encode(PROMPT)
        on_gpu = [token.token_id for token in engine.generate(ids, SamplingParams(max_tokens=16))]
    with load(demo_pack, "cpu", kernels="torch") as engine:
        assert on_gpu == [token.token_id for token in engine.generate(ids, SamplingParams(max_tokens=16))]
