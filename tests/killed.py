"""A training in a process of its own, that a signal may end."""

import os
import traceback
import warnings
from collections.abc import Callable

import torch


def how_it_ended(work: Callable[[], object]) -> int:
    """Run `work` in a copy of this process; its exit code, negative for a signal, as subprocess has it."""
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # the threads of a pool are not copied: whoever waits for them waits for ever
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
