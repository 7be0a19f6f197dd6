"""End in the way that the argument names."""

import atexit
import os
import signal
import sys
import threading


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text for you")


class Undying:
    def __del__(self):
        raise ValueError("in __del__")


def chained():
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("because of it") from error


def in_context():
    try:
        {}["missing"]
    except KeyError:
        raise RuntimeError("meanwhile")  # noqa: B904


def suppressed():
    try:
        {}["missing"]
    except KeyError:
        raise RuntimeError("alone") from None


def group():
    if sys.version_info < (3, 11):
        from exceptiongroup import ExceptionGroup as Group
    else:
        Group = ExceptionGroup  # noqa: F821, N806
    raise Group("several", [ValueError(1), Group("inner", [TypeError("two"), OSError(3, "three")])])


def noted():
    error = ValueError("with notes")
    if hasattr(error, "add_note"):
        error.add_note("a note\nof two lines")
    raise error


def deep():
    deep()


def unspeakable():
    raise Unspeakable


def interrupt():
    raise KeyboardInterrupt


def in_thread():
    thread = threading.Thread(target=chained, name="worker")
    thread.start()
    thread.join()
    print("main goes on")


def exit_in_thread():
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()


def in_del():
    Undying()
    kept.append(Undying())


def at_exit():
    atexit.register(print, "registered first")
    atexit.register(chained)
    atexit.register(print, "registered last")
    raise ValueError("main")


def exit_at_exit():
    atexit.register(sys.exit, 5)
    atexit.register(os.write, 1, b"last words\n")


def own_hooks():
    sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error)
    threading.excepthook = lambda args: print("thread hook:", args.exc_type.__name__)
    sys.unraisablehook = lambda args: print("unraisable hook:", args.exc_type.__name__)
    in_thread()
    in_del()
    chained()


def broken_hook():
    sys.excepthook = lambda kind, error, trace: chained()
    raise ValueError("main")


def no_hook():
    del sys.excepthook
    raise ValueError("main")


def hook_is_none():
    sys.excepthook = None
    raise ValueError("main")


def hook_leaves():
    sys.excepthook = lambda *_: sys.exit(9)
    raise ValueError("main")


def saved_hook():
    """As libraries do that restore what was there before, and call it."""
    before, sys.excepthook = sys.excepthook, lambda *args: (print("mine"), before(*args))
    print(before is sys.__excepthook__, threading.excepthook is threading.__excepthook__)
    raise ValueError("main")


def restored_hook():
    sys.excepthook = sys.__excepthook__
    raise ValueError("main")


def no_stderr():
    sys.stderr = None
    raise ValueError("main")


def closed_stderr():
    sys.stderr.close()
    raise ValueError("main")


def limit():
    sys.tracebacklimit = 1
    chained()


def syntax():
    compile("a = (1,\nb = 2", "text.py", "exec")


def without_modules():
    """As tests do that clean up: what is imported meanwhile is imported once more."""
    for name in set(sys.modules) - {"sys", "builtins", "__main__", "os", "io", "encodings"}:
        sys.modules.pop(name)
    raise ValueError("main")


def memory():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 31)


def stop_and_go():
    if not os.fork():
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))


def die(name):
    if name != "SIGKILL":
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.kill(os.getpid(), getattr(signal, name))


kept = []
way, *rest = sys.argv[1:]
if way.startswith("SIG"):
    die(way)
elif way == "exit":
    sys.exit(eval(rest[0]))
elif way == "_exit":
    os._exit(int(rest[0]))
elif way == "raise":
    raise eval(rest[0])
globals()[way]()
