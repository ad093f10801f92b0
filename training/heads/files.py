"""The files of a training, which are checked before torch is imported."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

from ragspec.errors import InputError, ModelError, StoreError
from ragspec.models.checks import CONFIG, check_head_files
from ragspec.storage.filesystem import LOCK, check_folder, writer_lock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHECKPOINT, PART = "training.pt", ".training.part"


def check_out(out: Path, *, resume: bool = False, replace: bool = True) -> None:
    """Raise InputError if a folder holds other files than a head, or an interrupted training.

    Args:
        resume: Expect an interrupted training, and raise StoreError without one.
        replace: Allow a head, which the training will replace.
    """
    check_folder(out)
    if (out / CHECKPOINT).is_file():
        if not resume:
            raise InputError(
                f"{out} holds a training that was left; expected --resume, or another folder."
            )
        return
    try:
        check_head_files(out)
        from ragspec.drafters.heads.files import holds_head

        # A model may hold a head, too; `save_head` alone leaves this mark.
        head = holds_head(out) and "ragspec" in json.loads((out / CONFIG).read_text())
    except ModelError:
        head = False
    if resume:
        advice = f"--start {out} learns on from its head." if head else "No head is there either."
        raise StoreError(
            f"Expected an interrupted training in {out}, got no {CHECKPOINT}. Leave --resume out. "
            f"{advice}"
        )
    if not out.is_dir() or set(out.iterdir()) <= {out / PART, out / LOCK}:  # left by an early kill
        return
    if not head:
        raise InputError(f"{out} holds other files; expected a new folder, or one with a head.")
    if not replace:
        raise InputError(f"{out} holds a head already; expected a new folder, or --replace.")


@contextmanager
def lock_out(out: Path) -> Iterator[None]:
    """Create the folder of a training, and keep other trainings out of it inside the block.

    Raises:
        StoreError: The folder cannot be written, or another process trains there.
    """
    was_there = out.exists()
    with writer_lock(out):
        try:
            yield
        finally:
            with suppress(OSError):  # the folder is in use, or the system keeps open files
                (out / LOCK).unlink()
                if not was_there:
                    out.rmdir()


def read_codes(path: Path) -> "tuple[NDArray[np.int64], NDArray[np.int64] | NDArray[np.float32]]":
    """Return the codes and conditions of a .npz file; see `code_texts`.

    Raises:
        InputError: The file does not hold `codes` and either `labels` or `features`.
    """
    import numpy as np

    expected = "the arrays 'codes' and either 'labels' or 'features'."
    try:
        with np.load(path, allow_pickle=False) as data:
            stored = sorted(data)
            names = [name for name in ("codes", "labels", "features") if name in stored]
            arrays = [data[name] for name in names]
    except (OSError, ValueError, TypeError, EOFError, BadZipFile) as error:
        # NumPy's own text advises to allow pickles, which can run code.
        reason = str(error) if isinstance(error, OSError) else type(error).__name__
        raise InputError(
            f"{path} cannot be read ({reason}); expected what numpy.savez writes, with {expected}"
        ) from None
    if names not in (["codes", "labels"], ["codes", "features"]):
        raise InputError(f"{path} holds {', '.join(stored) or 'nothing'}; expected {expected}")
    for name, each in zip(names, arrays, strict=True):
        if name != "features" and not np.issubdtype(each.dtype, np.integer):
            raise InputError(f"{path} has {name} of {each.dtype}; expected whole numbers.")
    kind = np.int64 if names[1] == "labels" else np.float32
    return arrays[0].astype(np.int64), arrays[1].astype(kind)
