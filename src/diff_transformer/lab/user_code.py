"""Files of Python that users give: an experiment, or the plan of a study."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_file(path: Path | str) -> ModuleType:
    """The module in the file ``path``, which is executed and may import files beside it; a file such as ``random.py``
    hides no module of that name."""
    if (folder := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.append(folder)
    spec = spec_from_file_location(f"{__name__}.{Path(path).stem}", path)
    assert spec is not None  # for a name that ends with .py
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
