"""For the scripts that draw: a script beside this file as a module."""

import importlib.machinery
import importlib.util
from pathlib import Path


def sibling(name):
    loader = importlib.machinery.SourceFileLoader(name, str(Path(__file__).resolve().parent / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module
