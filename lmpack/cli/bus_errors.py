"""Bus errors: a mapped file that is cut short, or whose drive fails, ends the process with a line, not in silence."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING

from lmpack.cli.report import one_line
from lmpack.errors import StorageError
from lmpack.expert_key import ExpertKey

if TYPE_CHECKING:
    from runtime.engine import Engine

_SA_SIGINFO = 4
_ADDRESS_AT = 16  # siginfo_t.si_addr
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction, of glibc and of musl."""

    _fields_ = (
        ("handler", _HANDLER),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def name_bus_errors(engine: Engine) -> None:
    """Have the process end with exit code 1 and the name of the expert whose mapped bytes are gone."""
    pack, libc, once = engine.plan.pack, ctypes.CDLL(None), threading.Lock()
    banks = [(entry.layer, engine.cache.bank(entry.layer)) for entry in pack.manifest.layers]
    ranges = [(layer, bank.storage.data_ptr(), len(bank.storage), bank.stride) for layer, bank in banks]

    # Python may run here, unlike in the handler of a signal that comes at any moment: this one comes out of arithmetic
    # that reads the mapping and holds no lock but the interpreter's, if that.
    def tell(_: int, told: int, __: int) -> None:
        with once:  # several threads come at once; the first ends all
            try:
                address = ctypes.c_uint64.from_address(told + _ADDRESS_AT).value
                for layer, start, nbytes, stride in ranges:
                    if start <= address < start + nbytes:
                        key = ExpertKey(layer, (address - start) // stride)
                        path = pack.expert_extents(key)[0].path
                        why = f"expert {key}: {path}: cut short, or its drive failed, while it was mapped"
                        line = f"lmpack: error: {one_line(why)}; run: lmpack validate {one_line(str(pack.path))}\n"
                        os.write(2, line.encode(errors="backslashreplace"))
                        os._exit(StorageError.exit_code)
            finally:
                libc.signal(signal.SIGBUS, None)  # not ours: the same read again ends the process

    action = _Action(_HANDLER(tell), flags=_SA_SIGINFO)
    libc.sigaction(signal.SIGBUS, ctypes.byref(action), None)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(action))  # the kernel keeps it to the end
