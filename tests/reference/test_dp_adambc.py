"""The whole private path against the paper's algorithm in plain float64, state included."""

import numpy as np
import torch
from dp_adambc import DPAdamBC
from test_noise import normals
from torch.func import functional_call

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.rng import RandomSource


def flat(tensors: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()


def test_fifty_steps_agree_with_the_plain_version():
    plan = make_plan(steps=50, seed=7, max_grad_norm=0.5)
    model, data = make_model(torch.float64), make_data(dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]
    sizes = [shape.numel() for shape in shapes]

    def gradient(theta: np.ndarray, example: int) -> np.ndarray:
        parts = torch.from_numpy(theta.copy()).split(sizes)
        state = {n: part.view(shape).requires_grad_() for n, part, shape in zip(names, parts, shapes, strict=True)}
        x, y = data[example]
        logits = functional_call(model, state, (x[None],))
        loss = torch.nn.functional.cross_entropy(logits, y[None])
        return flat(list(torch.autograd.grad(loss, list(state.values()))))

    plain = DPAdamBC(
        flat(list(model.parameters())),
        gradient,
        max_grad_norm=0.5,
        noise_multiplier=1.0,
        expected_batch_size=8,
        lr=0.01,
    )
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.01)
    noise = RandomSource(7).stream("noise")
    inputs = data.tensors[0]
    for step, batch in enumerate(plan.batches(data)):
        members = [int((inputs == row).all(1).nonzero()[0, 0]) for row in batch.examples[0]]
        plain.step(members, normals(noise, step, plain.theta.size).numpy())
        optimizer.step(grad=private_grad(batch))
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        for ours, theirs in (
            (flat(list(model.parameters())), plain.theta),
            (flat([state["exp_avg"] for state in states]), plain.m),
            (flat([state["exp_avg_sq"] for state in states]), plain.v),
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)
        assert all(state["step"] == plain.t for state in states)
        np.testing.assert_allclose(states[0]["exp_avg_noise_var"] / (1 - 0.999**plain.t), plain.phi, rtol=1e-12)
    assert plain.t == 50
