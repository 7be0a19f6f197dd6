"""Look at the interpreter with the tools that Python has for it."""

import gc
import sys
import threading


def settrace():
    seen = set()

    def trace(frame, event, arg):
        seen.add((frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name, event))
        return trace

    sys.settrace(trace)
    threading.settrace(trace)
    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    sys.settrace(None)
    print(sorted(seen))


def setprofile():
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append((frame.f_code.co_name, event)))
    work()
    sys.setprofile(None)
    print(seen)


def monitoring():
    if not hasattr(sys, "monitoring"):
        return
    seen = []
    events = sys.monitoring
    events.use_tool_id(events.PROFILER_ID, "mine")
    events.register_callback(
        events.PROFILER_ID, events.events.PY_START, lambda code, _: seen.append(code.co_name)
    )
    events.set_events(events.PROFILER_ID, events.events.PY_START)
    work()
    import tabnanny

    events.set_events(events.PROFILER_ID, 0)
    print([events.get_tool(number) for number in range(6)], len(seen))


def traced_to_the_end():
    """A trace function that is still there when the process ends of an exception."""

    def trace(frame, event, arg):
        # Python 3.14 prints the exception by code of its own, which is traced, too.
        if event == "call" and frame.f_code.co_filename == __file__:
            print(frame.f_code.co_name, flush=True)

    sys.settrace(trace)
    work()
    raise ValueError("main")


def audit():
    seen = []

    def hook(event, args):
        if event in ("sys.excepthook", "cpython._PySys_ClearAuditHooks"):
            print(event, args, flush=True)
        seen.append(event)

    sys.addaudithook(hook)
    import tabnanny

    print(seen)
    raise ValueError("main")


def tracemalloc():
    import tracemalloc

    tracemalloc.start(5)
    kept = [bytes(1000) for _ in range(10)]
    files = {
        trace[0].filename
        for trace in tracemalloc.take_snapshot().traces
        for trace in [trace.traceback]
    }
    print(len(kept), sorted(file.rpartition("/")[2] for file in files))


def garbage():
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    gc.collect()
    print(seen, gc.callbacks[0] is gc.callbacks[-1], gc.isenabled(), gc.get_threshold())
    gc.freeze()
    gc.unfreeze()
    gc.set_debug(gc.DEBUG_UNCOLLECTABLE)


def fault():
    import faulthandler

    print(faulthandler.is_enabled(), faulthandler.unregister(10))
    faulthandler.enable()
    faulthandler.register(10, all_threads=False, chain=False)
    import signal

    signal.raise_signal(10)
    faulthandler._sigsegv()


def finders():
    """A finder of the job's in front of all others, behind, and in place of all."""
    print(
        len(sys.meta_path),
        len(sys.path_hooks),
        [getattr(each, "__name__", "") for each in sys.meta_path],
    )

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            print("asked for", name)

    sys.meta_path.insert(0, Finder)
    import tabnanny

    sys.meta_path[:] = sys.meta_path[1:]
    sys.meta_path.remove(sys.meta_path[-1])
    try:
        import nothing_like_this
    except ImportError as error:
        print(error)
    raise ValueError("main")


def hooks():
    import builtins
    import os

    imported = builtins.__import__
    builtins.__import__ = lambda name, *rest: (print("import", name), imported(name, *rest))[1]
    import tabnanny

    # What the probe imports at an uncaught exception is documented.
    builtins.__import__ = imported
    print(os.fork.__module__, os._exit.__module__, type(sys.exit), type(os._exit))
    raise ValueError("main")


def logs():
    import logging
    import warnings

    logging.basicConfig(format="%(levelname)s %(module)s %(threadName)s %(message)s", level=10)
    logging.captureWarnings(True)
    warnings.simplefilter("always")
    warnings.warn("a warning", stacklevel=1)
    print(len(warnings.filters), sorted(logging.root.manager.loggerDict))
    try:
        work()
        1 / 0
    except ZeroDivisionError:
        logging.exception("it happened")
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("another", DeprecationWarning, stacklevel=1)
    print(len(caught))
    open(__file__)


def sources():
    import inspect
    import pickle
    import traceback

    print(inspect.signature(traceback.print_exception), inspect.signature(sys.exit))
    print(
        len(inspect.getsource(traceback.print_exception)), pickle.dumps(traceback.format_exception)
    )
    print(traceback.print_exception.__defaults__, traceback.print_exception.__code__.co_varnames)
    try:
        1 / 0
    except ZeroDivisionError as error:
        print(
            "".join(traceback.format_exception(error)), [f.name for f in traceback.extract_stack()]
        )
        traceback.print_exc(file=sys.stdout)


def work():
    return [each for each in range(3)]


globals()[sys.argv[1]]()
