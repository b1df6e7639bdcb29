"""Whole models through the factored engine against a loop over single examples, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_rules import assert_equal_to_loop
from torch import Tensor, nn

from benchmarks.workloads import WORKLOADS
from privgrad.engine.factored import Factored
from privgrad.types import LossFunction

IDS = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(2))


def assert_engine_equals_loop(model: nn.Module, loss_fn: LossFunction, examples: tuple[Tensor, ...]) -> None:
    factors = Factored(model, loss_fn)(examples)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert factors.keys() == parameters.keys()
    losses = [loss_fn(model, tuple(x[i : i + 1] for x in examples)).sum() for i in range(len(examples[0]))]
    rows = [torch.autograd.grad(loss, list(parameters.values())) for loss in losses]
    # A key's bias has gradient zero but for rounding, on the scale of the others.
    rounding = 1e-12 * max(float(grad.abs().max()) for row in rows for grad in row)
    for index, name in enumerate(parameters):
        assert_equal_to_loop(factors[name], torch.stack([row[index] for row in rows]), 1e-10, rounding)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads(name: str):
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.model().double()
    x, y = (part[:3].double() if part.is_floating_point() else part[:3] for part in workload.data())

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return workload.criterion(model(batch[0]), batch[1])

    assert_engine_equals_loop(model, loss_fn, (x, y))


def language_model_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0]).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[0][:, 1:], reduction="none").mean(1)


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    assert_engine_equals_loop(transformers.GPT2LMHeadModel(config).double(), language_model_loss, (IDS,))


@pytest.mark.parametrize("frozen", [False, True])
def test_bert(frozen: bool):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config).double()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layer.1" in name or "classifier" in name)
    lengths = torch.tensor([6, 3, 4])
    mask = (torch.arange(6) < lengths[:, None]).long()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        ids, mask, labels = batch
        return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, labels, reduction="none")

    assert_engine_equals_loop(model, loss_fn, (IDS, mask, torch.tensor([0, 1, 1])))
