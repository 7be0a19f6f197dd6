"""Use the library that the argument names, as people do."""

import os
import sys


def fails():
    raise ValueError("in a library's hands")


def uvloop():
    import asyncio

    import uvloop

    async def main():
        task = asyncio.create_task(asyncio.sleep(0.01))
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "1/0", stderr=-1)
        print(await task, (await process.communicate())[1].decode(), process.returncode)
        fails()

    loop = uvloop.new_event_loop()
    print(type(loop).__module__)
    loop.run_until_complete(main())


def gevent():
    from gevent import monkey

    print(sorted(name for name in ("threading", "socket", "ssl") if name in sys.modules))
    monkey.patch_all()
    import threading

    import gevent

    print(threading.current_thread().name, type(threading.main_thread()).__name__)
    job = gevent.spawn(fails)
    job.join()
    gevent.joinall([gevent.spawn(gevent.sleep, 0.01) for _ in range(3)])
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    fails()


def eventlet():
    import warnings

    warnings.simplefilter("ignore")
    import eventlet

    eventlet.monkey_patch()
    pool = eventlet.GreenPool(2)
    print(list(pool.imap(abs, [-1, -2])))
    eventlet.spawn(fails).wait()


def loky():
    import joblib

    print(joblib.Parallel(2)(joblib.delayed(abs)(each) for each in range(-4, 0)))
    joblib.Parallel(2, backend="multiprocessing")(joblib.delayed(abs)(each) for each in range(2))
    joblib.Parallel(2)(joblib.delayed(fails)() for _ in range(2))


def ray():
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    def seen():
        return (
            sys.excepthook is sys.__excepthook__,
            type(sys.exit).__name__,
            "ddpdoctor" in sys.modules,
        )

    print(ray.get(seen.remote()))
    try:
        ray.get(ray.remote(fails).remote())
    except ValueError as error:
        print(type(error).__name__, str(error).splitlines()[-1])
    ray.shutdown()


def dask():
    from distributed import Client

    with Client(n_workers=1, threads_per_worker=1, dashboard_address=None) as client:
        print(client.submit(abs, -1).result())
        print(repr(client.submit(fails, pure=False).exception()))
        print(
            client.submit(
                lambda: (sys.excepthook is sys.__excepthook__, "ddpdoctor" in sys.modules)
            ).result()
        )


def mpi():
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    total = MPI.COMM_WORLD.allreduce(rank)
    if rank:
        sys.exit(0)
    print(total)


def proctitle():
    import setproctitle

    print(os.path.basename(setproctitle.getproctitle().split()[0])[:6])
    setproctitle.setproctitle("a title of mine")
    with open("/proc/self/cmdline") as file:
        print(file.read().rstrip("\0"))
    fails()


def rich():
    from rich import traceback

    traceback.install(width=80)
    print(traceback.install(width=80) is not None)
    fails()


def sentry():
    import sentry_sdk

    sent = []

    class Transport(sentry_sdk.transport.Transport):
        def capture_envelope(self, envelope):
            for item in envelope.items:
                sent.append([each["type"] for each in item.get_event()["exception"]["values"]])
                print(sent, flush=True)

    sentry_sdk.init(dsn="http://key@127.0.0.1:9/1", transport=Transport, default_integrations=True)
    print(sys.excepthook is sys.__excepthook__, sys.excepthook.__qualname__)
    fails()


def exceptiongroup():
    import exceptiongroup

    print(exceptiongroup.ExceptionGroup.__module__)
    try:
        raise exceptiongroup.ExceptionGroup("caught", [ValueError(1)])
    except exceptiongroup.ExceptionGroup as error:
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    raise exceptiongroup.ExceptionGroup("several", [ValueError(1), TypeError("two")])


def pickles():
    import cloudpickle
    import dill

    for library in cloudpickle, dill:
        for thing in sys.exit, os._exit, os.fork, sys.excepthook, print, fails, lambda: 1:
            try:
                data = library.dumps(thing)
                print(library.__name__, len(data), library.loads(data) is thing)
            except Exception as error:
                print(library.__name__, repr(error)[:80])


def kernel():
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    # The kernel's command names the interpreter of its specification, which may be another one.
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)

    def show(message):
        kind, content = message["msg_type"], message["content"]
        if kind in ("stream", "error"):
            print(kind, content.get("text") or content["traceback"][-1], flush=True)

    cell = "import sys; print(sys.excepthook.__qualname__, type(sys.exit), len(sys.meta_path)); 1/0"
    client.execute_interactive(cell, output_hook=show, timeout=120)
    client.execute_interactive(
        "import os; os.getpid() and print(exit)", output_hook=show, timeout=120
    )
    client.stop_channels()
    manager.shutdown_kernel()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
