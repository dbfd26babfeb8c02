"""Every implementation of Kernels, over every dtype it takes, against float64 products of the dequantised weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lmpack.errors import UnsupportedError
from lmpack.layer_entry import ExpertPart
from runtime.expert_bank import ExpertBank
from runtime.kernels.kernels import load_kernels
from runtime.kernels.rms_norm import RMSNorm
from runtime.kernels.weight import Weight
from tests.kernel_cases import (
    DTYPES,
    HIDDEN,
    INNER,
    NUM_SLOTS,
    TORCH_TOLERANCE,
    Embed,
    FeedForward,
    Linear,
    bank_of,
    error,
    exact,
    experts_of,
    inputs,
    linear,
    random_slots,
    swiglu,
    tolerance,
    weight,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.kernels.kernels import Kernels


@pytest.fixture(params=[("torch", 1), ("ggml", 1), ("ggml", 2)], ids=lambda param: f"{param[0]}-{param[1]}")
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    name, num_threads = request.param
    kernels = load_kernels(name, num_threads=num_threads)
    yield kernels
    kernels.close()


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestEveryKernel:
    @pytest.mark.parametrize("n", [1, 2, 9])
    def test_linear_equals_the_float64_product(self, kernels: Kernels, dtype: str, n: int) -> None:
        matrix = weight(dtype, 96, HIDDEN)
        x = inputs(n, HIDDEN)
        product = linear(kernels, x, matrix)
        assert error(product, x.double().numpy() @ exact(matrix).T) < tolerance(kernels, dtype)

    @pytest.mark.parametrize("n", [1, 7])
    def test_a_norm_comes_before_the_products(self, kernels: Kernels, n: int) -> None:
        norm = RMSNorm(inputs(HIDDEN, seed=9), 1e-3)
        x = inputs(n, HIDDEN)
        wide = x.double()
        normalised = (
            wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
        ).numpy()
        matrix = weight("F32", 64, HIDDEN)
        assert error(linear(kernels, x, matrix, norm), normalised @ exact(matrix).T) < TORCH_TOLERANCE

    @pytest.mark.parametrize("n", [1, 9, 40])
    def test_a_prepared_matrix_gives_the_float64_product_too(
        self, kernels: Kernels, dtype: str, n: int
    ) -> None:
        matrix = weight(dtype, 1064, HIDDEN)  # more rows than are laid out at once, and a rest
        prepared = kernels.prepare(Weight(matrix.storage.clone(), dtype, matrix.shape))
        x = inputs(n, HIDDEN)
        assert error(linear(kernels, x, prepared), x.double().numpy() @ exact(matrix).T) < tolerance(
            kernels, dtype
        )

    def test_embed_gives_the_rows_of_the_table(self, kernels: Kernels, dtype: str) -> None:
        table = weight(dtype, 50, HIDDEN)
        rows = kernels.run(Embed(table), torch.tensor([3, 49, 3, 0], dtype=torch.int32))
        np.testing.assert_allclose(rows.numpy(), exact(table)[[3, 49, 3, 0]], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("n", [1, 9])
    def test_feed_forward_equals_the_float64_swiglu(self, kernels: Kernels, dtype: str, n: int) -> None:
        gate, up = weight(dtype, INNER, HIDDEN), weight(dtype, INNER, HIDDEN, seed=2)
        down = weight(dtype, HIDDEN, INNER, seed=3)
        x = inputs(n, HIDDEN)
        oracle = swiglu(x.double().numpy(), exact(gate), exact(up), exact(down))
        assert error(kernels.run(FeedForward(gate, up, down), x), oracle) < 2 * tolerance(kernels, dtype)

    @pytest.mark.parametrize("n", [1, 5])
    def test_expert_ffn_equals_the_float64_swiglu_of_each_slot(
        self, kernels: Kernels, dtype: str, n: int
    ) -> None:
        bank, experts = bank_of(dict.fromkeys(("gate", "up", "down"), dtype), ("gate", "up", "down"))
        self.check_expert_ffn(kernels, bank, experts, n, dtype)

    @pytest.mark.parametrize(
        "order",
        [
            ("up", "gate", "down"),
            ("down", "gate", "up"),
            ("gate", "down", "up"),
            ("gate_up", "down"),
            ("down", "gate_up"),
        ],
    )
    def test_expert_ffn_finds_the_parts_in_any_order(self, kernels: Kernels, order: tuple[str, ...]) -> None:
        bank, experts = bank_of(dict.fromkeys(("gate", "up", "down"), "Q8_0"), order)
        self.check_expert_ffn(kernels, bank, experts, 2, "Q8_0")

    def test_expert_ffn_takes_parts_of_different_dtypes(self, kernels: Kernels) -> None:
        bank, experts = bank_of({"gate": "Q4_K", "up": "BF16", "down": "Q6_K"}, ("gate", "up", "down"))
        self.check_expert_ffn(kernels, bank, experts, 3, "Q4_K", "BF16", "Q6_K")

    def check_expert_ffn(
        self,
        kernels: Kernels,
        bank: ExpertBank,
        experts: list[tuple[Weight, Weight, Weight]],
        n: int,
        *dtypes: str,
    ) -> None:
        x, slots = inputs(n, HIDDEN), random_slots(n, 4)
        oracle = np.stack(
            [
                [swiglu(row, *(exact(matrix) for matrix in experts[slot])) for slot in chosen]
                for row, chosen in zip(x.double().numpy(), slots.tolist(), strict=True)
            ]
        )
        assert error(experts_of(kernels, x, slots, bank), oracle) < 2 * tolerance(kernels, *dtypes)

    def test_an_expert_gives_a_token_the_same_bits_in_every_company(
        self, kernels: Kernels, dtype: str
    ) -> None:
        dtypes = dict.fromkeys(("gate", "up", "down"), dtype)
        slot_of = np.random.default_rng(7).permutation(NUM_SLOTS).tolist()
        bank, _ = bank_of(dtypes, ("gate", "up", "down"))
        moved, _ = bank_of(dtypes, ("gate", "up", "down"), slot_of)
        n = (
            64 if kernels.computes_at_once(64 * 8, bank) else 8
        )  # one that does not dequantises for each token
        x, slots = inputs(n, HIDDEN), random_slots(n, 8)
        together = experts_of(kernels, x, slots, bank).clone()
        assert torch.equal(kernels.expert_ffn(x, slots.tolist(), bank), together)
        alone = [experts_of(kernels, x[t : t + 1], slots[t : t + 1], bank).clone() for t in range(n // 4)]
        assert torch.equal(torch.cat(alone), together[: n // 4])
        one_by_one = [
            experts_of(kernels, x[:1], slots[:1, rank : rank + 1], bank).clone() for rank in range(8)
        ]
        assert torch.equal(torch.cat(one_by_one, 1), together[:1])
        elsewhere = experts_of(kernels, x, torch.tensor(slot_of, dtype=torch.int32)[slots], moved)
        assert torch.equal(elsewhere, together)
        waves = torch.empty_like(together)
        for wave in torch.tensor_split(torch.arange(NUM_SLOTS), 3):
            tokens, ranks = torch.isin(slots, wave).nonzero(as_tuple=True)
            waves[tokens, ranks] = experts_of(kernels, x[tokens], slots[tokens, ranks, None], bank).squeeze(1)
        assert torch.equal(waves, together)

    @pytest.mark.parametrize("order", [("gate", "up", "down"), ("gate", "down", "up")])
    def test_a_bank_of_many_slots_gives_the_same_bits_as_a_small_one(
        self, kernels: Kernels, order: tuple[str, ...]
    ) -> None:
        few, _ = bank_of(dict.fromkeys(("gate", "up", "down"), "Q4_0"), order)
        num_slots = 700  # 12 of them hold anything; the others' memory is never touched
        storage = torch.empty(num_slots * few.stride, dtype=torch.uint8)
        places = torch.from_numpy(
            np.random.default_rng(3).permutation(num_slots)[:NUM_SLOTS].astype(np.int32)
        )
        for slot, place in enumerate(places.tolist()):
            content = few.storage[slot * few.stride : (slot + 1) * few.stride]
            storage[place * few.stride : (place + 1) * few.stride] = content
        many = ExpertBank(storage, few.stride, num_slots, few.parts)
        x, slots = inputs(2, HIDDEN), random_slots(2, 10)
        expected = experts_of(kernels, x, slots, few).clone()
        assert torch.equal(experts_of(kernels, x, places[slots], many), expected)
        assert torch.equal(experts_of(kernels, x[:1], places[slots[:1]], many), expected[:1])

    def test_the_layout_of_the_parts_does_not_change_the_bits(self, kernels: Kernels) -> None:
        x, slots = inputs(3, HIDDEN), random_slots(3, 4)
        dtypes = dict.fromkeys(("gate", "up", "down"), "Q4_K")
        orders = (("gate", "up", "down"), ("up", "gate", "down"), ("gate", "down", "up"), ("gate_up", "down"))
        results = [experts_of(kernels, x, slots, bank_of(dtypes, order)[0]).clone() for order in orders]
        assert all(torch.equal(result, results[0]) for result in results)

    def test_repeated_calls_read_the_weights_of_each_call(self, kernels: Kernels) -> None:
        first, second = weight("Q8_0", 64, HIDDEN), weight("Q8_0", 64, HIDDEN, seed=2)
        x = inputs(1, HIDDEN)
        one, other = Linear(first), Linear(second)
        a, b, again = (kernels.run(block, x).clone() for block in (one, other, one))
        assert torch.equal(a, again)
        assert not torch.equal(a, b)

    def test_larger_calls_in_between_do_not_disturb_smaller_ones(self, kernels: Kernels) -> None:
        gate, up, down = (weight("Q8_0", HIDDEN, HIDDEN, seed=seed) for seed in range(3))
        x = inputs(1, HIDDEN)
        block = FeedForward(gate, up, down)
        before = kernels.run(block, x).clone()
        for n in (3, 100, 2):
            many = kernels.run(block, x.repeat(n, 1))
            assert error(many, np.repeat(before.double().numpy(), n, 0)) < 1e-6
        assert torch.equal(kernels.run(block, x), before)

    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
    def test_a_poisoned_token_spoils_no_other(self, kernels: Kernels, dtype: str, poison: float) -> None:
        bank, _ = bank_of(dict.fromkeys(("gate", "up", "down"), dtype), ("gate", "up", "down"))
        x, slots = inputs(3, HIDDEN), random_slots(3, 4)
        clean = experts_of(kernels, x, slots, bank).clone()
        x[1, ::7] = poison
        poisoned = experts_of(kernels, x, slots, bank)
        assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
        linear(kernels, x[1:2].clone(), weight(dtype, 8, HIDDEN))

    def test_a_part_that_no_kernel_uses_is_named(self, kernels: Kernels) -> None:
        bank, _ = bank_of(dict.fromkeys(("gate", "up", "down"), "F16"), ("gate", "up", "down"))
        bias = ExpertPart("down_bias", "F32", (HIDDEN,), 0, 4 * HIDDEN)
        biased = ExpertBank(bank.storage, bank.stride, bank.num_slots, (*bank.parts, bias))
        with pytest.raises(UnsupportedError, match="down_bias"):
            experts_of(kernels, inputs(1, HIDDEN), random_slots(1, 2), biased)

    def test_a_missing_part_is_named(self, kernels: Kernels) -> None:
        bank, _ = bank_of(dict.fromkeys(("gate", "up", "down"), "F16"), ("gate", "up", "down"))
        gateless = ExpertBank(bank.storage, bank.stride, bank.num_slots, bank.parts[1:])
        with pytest.raises(UnsupportedError, match="without gate"):
            experts_of(kernels, inputs(1, HIDDEN), random_slots(1, 2), gateless)

    def test_a_transposed_part_is_refused_with_both_shapes(self, kernels: Kernels) -> None:
        bank, _ = bank_of(dict.fromkeys(("gate", "up", "down"), "F16"), ("gate", "up", "down"))
        gate = bank.parts[0]
        turned = ExpertPart(gate.role, gate.dtype, gate.shape[::-1], gate.offset, gate.nbytes)
        wrong = ExpertBank(bank.storage, bank.stride, bank.num_slots, (turned, *bank.parts[1:]))
        with pytest.raises(UnsupportedError, match=r"gate has shape \[512, 256\], expected \[256, 512\]"):
            experts_of(kernels, inputs(1, HIDDEN), random_slots(1, 2), wrong)

    def test_a_dtype_without_a_product_is_named(self, kernels: Kernels) -> None:
        nonsense = Weight(torch.zeros(64, dtype=torch.uint8), "F8_E4M3", (2, 32))
        with pytest.raises(UnsupportedError, match="F8_E4M3"):
            linear(kernels, inputs(1, 32), nonsense)


class TestGGMLKernels:
    def test_the_number_of_threads_does_not_change_the_bits(self, dtype: str) -> None:
        bank, _ = bank_of(dict.fromkeys(("gate", "up", "down"), dtype), ("gate", "up", "down"))
        matrix = weight(dtype, 1024, HIDDEN)
        x, slots = inputs(9, HIDDEN), random_slots(9, 6)
        results = []
        for num_threads in (1, 2, 3):
            kernels = load_kernels("ggml", num_threads=num_threads)
            results.append((linear(kernels, x, matrix), experts_of(kernels, x, slots, bank).clone()))
            kernels.close()
        for product, outputs in results[1:]:
            assert torch.equal(product, results[0][0])
            assert torch.equal(outputs, results[0][1])
