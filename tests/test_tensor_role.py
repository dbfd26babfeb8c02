"""The sorting rule: every tensor is claimed, and a name that speaks of experts in vain is an error."""

from __future__ import annotations

import pytest

from converters.tensor_role import (
    SharedTensor,
    SinglePart,
    StackedPart,
    TensorRole,
    sort_gguf_tensors,
    sort_hf_tensors,
)
from lmpack.errors import CheckpointError

Shape = tuple[int, ...]


def gguf_role(name: str, shape: Shape, *others: tuple[str, Shape]) -> TensorRole:
    return sort_gguf_tensors([(name, shape), *others], "m.gguf")[0]


def hf_role(name: str, shape: Shape, *others: tuple[str, Shape], **options: int) -> TensorRole:
    return sort_hf_tensors([(name, shape), *others], "hf", **options)[0]


GATES = ("blk.3.ffn_gate_exps.weight", (8, 64, 32))


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("blk.3.ffn_gate_exps.weight", (8, 64, 32), StackedPart(3, "gate", 8, (64, 32))),
        ("blk.3.ffn_up_exps.weight", (8, 64, 32), StackedPart(3, "up", 8, (64, 32))),
        ("blk.3.ffn_down_exps.weight", (8, 32, 64), StackedPart(3, "down", 8, (32, 64))),
        ("blk.3.ffn_gate_up_exps.weight", (8, 128, 32), StackedPart(3, "gate_up", 8, (128, 32))),
        ("blk.3.ffn_gate_exps.bias", (8, 64), StackedPart(3, "gate_bias", 8, (64,))),
        ("blk.3.ffn_down_exps.scale", (8,), StackedPart(3, "down_scale", 8, ())),
        ("blk.3.ffn_up_exps.input_scale", (8,), StackedPart(3, "up_input_scale", 8, ())),
        ("blk.3.ffn_up_exps.scale", (1,), SharedTensor("blk.3.ffn_up_exps.scale")),
        ("blk.3.ffn_up.7.weight", (64, 32), SinglePart(3, 7, "up", (64, 32))),
        ("blk.3.ffn_down.0.bias", (32,), SinglePart(3, 0, "down_bias", (32,))),
    ],
)
def test_parts_of_gguf_experts_are_found(name: str, shape: Shape, role: TensorRole) -> None:
    others = [] if name == GATES[0] else [GATES]
    assert gguf_role(name, shape, *others) == role


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "blk.3.ffn_gate_inp.weight",
        "blk.3.exp_probs_b.bias",
        "blk.3.ffn_gate_shexp.weight",
        "blk.3.ffn_gate_inp_shexp.weight",
        "blk.3.ffn_norm_exps.weight",
        "blk.3.ffn_gate_chexps.weight",
        "blk.0.ffn_gate.weight",
        "blk.61.nextn.eh_proj.weight",
        "v.blk.0.ffn_up.weight",
    ],
)
def test_what_every_token_needs_is_shared_in_gguf(name: str) -> None:
    assert gguf_role(name, (8, 4, 2), GATES) == SharedTensor(name)


@pytest.mark.parametrize(
    "name",
    [
        "blk.3.ffn_side_exps.weight",
        "blk.3.ffn_gate_exps",
        "dec.blk.3.ffn_gate_exps.weight",
        "blk.3.attn_q_exps.weight",
        "blk.9.ffn_gate_exps.bias",  # its layer has no weights
        "blk." + "9" * 5000 + ".ffn_gate_exps.weight",
    ],
)
def test_a_gguf_name_that_speaks_of_experts_in_vain_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"m.gguf: tensor {name} of shape .* speaks of experts"):
        gguf_role(name, (8, 64), GATES)


def test_a_stack_of_one_expert_may_have_lost_its_first_dimension() -> None:
    assert gguf_role("blk.0.ffn_up_exps.weight", (64, 32)) == StackedPart(0, "up", 1, (64, 32))
    assert gguf_role("blk.0.ffn_up_exps.weight", (1, 64, 32)) == StackedPart(0, "up", 1, (64, 32))


def test_layers_may_have_different_numbers_of_experts_but_not_one_layer() -> None:
    roles = sort_gguf_tensors([GATES, ("blk.4.ffn_gate_exps.weight", (5, 64, 32))], "m.gguf")
    assert [role.num_experts for role in roles if isinstance(role, StackedPart)] == [8, 5]
    with pytest.raises(CheckpointError, match="stacks 5 experts, another tensor of its layer 8"):
        gguf_role(*GATES, ("blk.3.ffn_up_exps.weight", (5, 64, 32)))
    with pytest.raises(CheckpointError, match="layer 3 has 8 of them"):
        gguf_role("blk.3.ffn_up_exps.bias", (5, 64), GATES)


AT = "model.layers.3."


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        (AT + "mlp.experts.7.gate_proj.weight", (64, 32), SinglePart(3, 7, "gate", (64, 32))),
        (AT + "mlp.experts.7.up_proj.weight", (64, 32), SinglePart(3, 7, "up", (64, 32))),
        (AT + "mlp.experts.7.down_proj.weight", (32, 64), SinglePart(3, 7, "down", (32, 64))),
        (AT + "mlp.experts.7.gate_proj.bias", (64,), SinglePart(3, 7, "gate_bias", (64,))),
        (AT + "mlp.experts.7.gate_proj.weight_scale_inv", (1, 1), SinglePart(3, 7, "gate_weight_scale_inv", (1, 1))),
        (AT + "mlp.experts.7.up_proj.qweight", (8, 64), SinglePart(3, 7, "up_qweight", (8, 64))),
        (AT + "block_sparse_moe.experts.7.w1.weight", (64, 32), SinglePart(3, 7, "gate", (64, 32))),
        (AT + "block_sparse_moe.experts.7.w2.weight", (32, 64), SinglePart(3, 7, "down", (32, 64))),
        (AT + "block_sparse_moe.experts.7.w3.weight", (64, 32), SinglePart(3, 7, "up", (64, 32))),
        ("backbone.layers.3.mixer.experts.7.up_proj.weight", (64, 32), SinglePart(3, 7, "up", (64, 32))),
        ("decoder.layers.3.ffn.experts.expert_7.fc1.weight", (64, 32), SinglePart(3, 7, "up", (64, 32))),
        (AT + "mlp.experts.7.Odd-Name.weight", (2,), SinglePart(3, 7, "odd_name", (2,))),
        (AT + "mlp.experts.gate_up_proj", (8, 128, 32), StackedPart(3, "gate_up", 8, (128, 32))),
        (AT + "mlp.experts.down_proj", (8, 32, 64), StackedPart(3, "down", 8, (32, 64))),
        (AT + "mlp.experts.gate_up_proj_blocks", (8, 128, 2, 16), StackedPart(3, "gate_up_blocks", 8, (128, 2, 16))),
        (AT + "mlp.experts.gate_up_proj_scales", (8, 128, 2), StackedPart(3, "gate_up_scales", 8, (128, 2))),
        (AT + "block_sparse_moe.input_linear.weight", (8, 128, 32), StackedPart(3, "gate_up", 8, (128, 32))),
        (AT + "block_sparse_moe.output_linear.weight", (8, 32, 64), StackedPart(3, "down", 8, (32, 64))),
        (AT + "moe.up_proj.weight", (8, 64, 32), StackedPart(3, "up", 8, (64, 32))),
    ],
)  # fmt: skip
def test_parts_of_hf_experts_are_found(name: str, shape: Shape, role: TensorRole) -> None:
    assert hf_role(name, shape) == role


def test_hf_biases_are_stacked_like_their_weights() -> None:
    weights = (AT + "mlp.experts.gate_up_proj_blocks", (8, 128, 2, 16))
    assert hf_role(AT + "mlp.experts.gate_up_proj_bias", (8, 128), weights) == StackedPart(
        3, "gate_up_bias", 8, (128,)
    )


def test_experts_that_lie_flat_in_a_matrix_are_cut_by_the_configs_number() -> None:
    name = "transformer.blocks.3.ffn.experts.mlp.v1"
    assert hf_role(name, (8 * 64, 32), num_experts=8) == StackedPart(3, "up", 8, (64, 32))


@pytest.mark.parametrize(
    "name",
    [
        AT + "mlp.gate.weight",
        AT + "mlp.shared_expert.gate_proj.weight",
        AT + "mlp.shared_experts.gate_proj.weight",
        AT + "mlp.shared_expert_gate.weight",
        AT + "mlp.chunk_experts.2.gate_proj.weight",
        AT + "mlp.expert_bias",
        AT + "mlp.experts.post_expert_norm.weight",
        AT + "block_sparse_moe.gate_proj.weight",
        AT + "shared_mlp.input_linear.weight",
    ],
)
def test_what_every_token_needs_is_shared_in_hf(name: str) -> None:
    assert hf_role(name, (16, 4)) == SharedTensor(name)


@pytest.mark.parametrize(
    "name",
    [AT + "mlp.experts.mystery", AT + "mlp.experts", "experts.3.w1.weight", AT + "mlp.local_experts.table"],
)
def test_an_hf_name_that_speaks_of_experts_in_vain_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"hf: tensor {name} of shape .* speaks of experts"):
        hf_role(name, (8, 64))


def test_the_layers_of_a_prediction_head_are_numbered_after_the_models() -> None:
    head = ("mtp.layers.0.mlp.experts.1.up_proj.weight", (64, 32))
    main = (AT + "mlp.experts.1.up_proj.weight", (64, 32))
    roles = sort_hf_tensors([head, main], "hf", num_hidden_layers=48)
    assert roles == [SinglePart(48, 1, "up", (64, 32)), SinglePart(3, 1, "up", (64, 32))]
