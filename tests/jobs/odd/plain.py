"""Print what a program sees of its interpreter, and end with an exception."""

import sys

loaded = sorted(sys.modules)
path = list(sys.path)

import os
import signal
import threading
import warnings

print(__name__, __file__ and os.path.basename(__file__), __doc__ and len(__doc__), sys.argv)
print(sys.flags, sys._xoptions, sys.warnoptions, len(warnings.filters))
print(loaded, path, len(sys.path_hooks), sep="\n")
print(threading.excepthook, sys.unraisablehook, sys.displayhook)
print([signal.getsignal(each) for each in signal.Signals])
for stream in sys.stdin, sys.stdout, sys.stderr:
    print(stream and (stream.name, stream.encoding, stream.errors, stream.isatty()))
print(
    sorted(os.listdir("/proc/self/fd")),
    os.umask(0o22),
    [each.name for each in threading.enumerate()],
)
raise ValueError("the end")
