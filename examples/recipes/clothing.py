"""The recipe of clothing.toml in Python: features from synthetic silhouettes, and a private head, on Fashion-MNIST."""

import torch

import privgrad as pg
from privgrad import data
from privgrad import features as ft


def main(folder: str = "runs/features/clothing", examples: int = 60_000) -> pg.Head:
    clothing = data.fashion_mnist(standardize=False)  # pixels in [0, 1]
    images, labels = (tensor[:examples] for tensor in clothing.train.tensors)

    public = ft.silhouettes(6000)  # random numbers decide all statistics
    extractor = ft.join((ft.Whitened(ft.Patches(public), public, keep=2048), 1.0), (ft.Whitened(ft.Hog(), public), 0.5))
    # The folder is as private as the images.
    features = ft.cache(extractor, images, folder, dtype=torch.float16)

    head = pg.fit_head(
        features, labels, num_classes=10, extractor=extractor, target_epsilon=3.0, delta=1e-5, num_examples=examples
    )
    unseen, truth = clothing.test.tensors
    guesses = head.predict(unseen)
    accuracy = (guesses == truth).double().mean()
    print(f"accuracy {accuracy:.4f} at epsilon {head.epsilon:.4f}")
    return head


if __name__ == "__main__":
    main().save("runs/clothing-head", overwrite=True)  # pg.Head.load(...) predicts from pixels, in another program
