"""Draw game tiles with and without speculation: the same images, fewer forward passes."""

from pathlib import Path

import torch

from ragspec.visual import ImagePipeline

fast = ImagePipeline.from_pretrained("tiles", drafter="model", rule="exact")
plain = ImagePipeline(**fast.components)
bold = ImagePipeline(**fast.components, drafter=fast.draft, rule="lantern", delta=0.05)

one, two, three = (
    pipe(class_labels=[3, 7], guidance_scale=2.0, num_images_per_prompt=2, seed=1)
    for pipe in (fast, plain, bold)
)

print("the same images:", torch.equal(one.codes, two.codes))
print(f"{one.stats.forwards} forward passes instead of {two.stats.forwards}, label {one.label}")
print(f"lantern: {three.stats.forwards}, label {three.label}, {three.stats.summary()}")

folder = Path("sampled")
folder.mkdir(exist_ok=True)
for number, image in enumerate(one.images):
    image.save(folder / f"tile-{number}.png")
