"""Files that take the place of others once all of them is written."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a path to write to, in a folder beside the target: what is there at the end goes where the target is.

    Other files of that folder go first, as the one that is named may be read with them. After an error nothing has
    changed, and nothing is left.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder, target.name)
        yield made
        for file in [*(f for f in Path(folder).iterdir() if f != made), made]:
            os.replace(file, target.parent / file.name)
