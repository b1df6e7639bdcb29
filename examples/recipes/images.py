"""Write images/: pictures of Fashion-MNIST as PNG files in one folder per class, for two recipes.

images_no_encoder.toml and images_frozen_encoder.toml train on them.
"""

import tomllib
from pathlib import Path

from PIL import Image

from privgrad import data


def main(folder: str = "images", count: int = 12_000) -> None:
    recipe = tomllib.loads((Path(__file__).parent / "images_frozen_encoder.toml").read_text())
    pixels, labels = data.fashion_mnist(standardize=False).train.tensors
    names: list[str] = recipe["data"]["classes"]
    for name in names:
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
    for index, (image, label) in enumerate(zip(pixels[:count], labels[:count], strict=True)):
        place = Path(folder) / names[int(label)] / f"{index:05}.png"
        Image.fromarray((image[0] * 255).round().byte().numpy()).save(place)


if __name__ == "__main__":
    main()
