"""Views of an example: what they are, and that their mean gradient is clipped as one."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from privgrad.engine.factored import Factored
from privgrad.gradient.functional import seeded
from privgrad.gradient.reference import Vmap
from privgrad.perturb.augmentation import multiplicity, shift_and_flip


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def augment(batch: Any) -> Any:
    return shift_and_flip(batch[0], pixels=2), batch[1]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)
    return nn.Sequential(*layers).double()


BATCH = (torch.randn(5, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 3)


@pytest.mark.parametrize("perturb", [None, pg.perturb.BAM(0.2), pg.perturb.BAM(0.2, mode="exact")], ids=repr)
def test_the_gradient_is_that_of_the_mean_over_the_same_views(perturb: Any):
    model = model_of()
    losses = multiplicity(loss_fn, augment, views=3)
    chosen = pg.perturb.SampleGradient() if perturb is None else perturb
    engine = Factored(model, losses)
    chosen.gradients(engine, BATCH, 0, {})  # audits draw as well
    chosen.gradients(engine, BATCH, 0, {})
    with seeded(5):
        found = chosen.gradients(engine, BATCH, 0, {})
    with seeded(5):
        views = augment(tuple(part.repeat_interleave(3, 0) for part in BATCH))[0].unflatten(0, (5, 3))

    def of_views(model: nn.Module, batch: Any) -> Tensor:
        size = len(batch[0])
        return loss_fn(model, (batch[0].flatten(0, 1), batch[1].repeat_interleave(3))).view(size, 3).mean(1)

    wanted = chosen.gradients(Vmap(model, of_views), (views, BATCH[1]), 0, {})
    for name, factor in wanted.items():
        torch.testing.assert_close(found[name].dense(), factor.dense(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found[name].norms(), factor.norms(), rtol=1e-9, atol=1e-11)


def test_one_view_is_no_augmentation():
    assert multiplicity(loss_fn, augment, views=1) is loss_fn


def test_a_training_step_with_views():
    plan = pg.PrivacyPlan(
        sample_rate=0.5,
        steps=3,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_examples=20,
        expected_batch_size=10,
        seed=0,
    )
    data = torch.utils.data.TensorDataset(torch.randn(20, 2, 8, 8).double(), torch.arange(20) % 3)
    model = model_of()
    private_grad = pg.PrivateGradient(
        model, multiplicity(loss_fn, augment, views=4), plan, perturb=pg.perturb.BAM(0.05)
    )
    optimizer = pg.optim.NAdam(model.named_parameters(), lr=1e-3)
    for batch in plan.batches(data):
        optimizer.step(grad=private_grad(batch))


def test_in_evaluation_mode_nothing_changes():
    model = model_of().eval()
    torch.testing.assert_close(multiplicity(loss_fn, augment, views=3)(model, BATCH), loss_fn(model, BATCH))


def test_every_view_is_a_crop_of_the_mirrored_image():
    torch.manual_seed(0)
    images = torch.arange(2 * 6 * 5, dtype=torch.float32).view(1, 2, 6, 5).expand(400, -1, -1, -1)
    padded = np.pad(images[0].numpy(), ((0, 0), (2, 2), (2, 2)), mode="symmetric")
    crops = {
        (dy, dx, flipped): crop[:, :, ::-1] if flipped else crop
        for dy in range(5)
        for dx in range(5)
        for flipped in (False, True)
        for crop in [padded[:, dy : dy + 6, dx : dx + 5]]
    }
    seen = dict.fromkeys(crops, 0)
    for view in shift_and_flip(images, pixels=2).numpy():
        (key,) = [key for key, crop in crops.items() if np.array_equal(view, crop)]
        seen[key] += 1
    assert all(seen.values())
    still = seen[2, 2, False] + seen[2, 2, True]
    assert still / 400 == pytest.approx(0.5 + 0.5 / 25, abs=0.1)


def test_flips_are_along_the_direction_given_and_zero_probability_changes_nothing():
    images = torch.randn(8, 1, 8, 8)
    assert torch.equal(shift_and_flip(images, probability=0.0), images)
    for flip, dim in (("horizontal", 3), ("vertical", 2)):
        options: Any = {"pixels": 0, "probability": 1.0, "flip": flip}
        assert torch.equal(shift_and_flip(images, **options), images.flip(dim))
    assert torch.equal(shift_and_flip(images, pixels=0, probability=1.0, flip=None), images)
    assert not torch.equal(shift_and_flip(images, pixels=2, probability=1.0, flip=None), images)


@pytest.mark.parametrize("wrong", [{"pixels": -1}, {"pixels": 4}, {"probability": 2.0}, {"flip": "diagonal"}])
def test_wrong_options_are_refused(wrong: Any):
    with pytest.raises(pg.PrivacyError, match="shift_and_flip"):
        shift_and_flip(torch.zeros(1, 1, 4, 4), **wrong)
    with pytest.raises(pg.PrivacyError, match="views"):
        multiplicity(loss_fn, augment, views=0)


def test_views_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match="not enough values to unpack"):
        shift_and_flip(torch.zeros(3, 8, 8))
    mean = multiplicity(lambda model, batch: batch[0].flatten(1).sum(1).mean(), lambda batch: batch, views=2)
    with pytest.raises(pg.PrivacyError, match=r"losses of shape \(B,\)"):
        mean(nn.Identity(), (torch.zeros(3, 4), torch.zeros(3)))
