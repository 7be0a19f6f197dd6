"""Start processes in the way that the arguments name; some of them fail."""

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import time


def twice(number):
    if number == 3:
        raise ValueError("three")
    return 2 * number


def work(number):
    if number == 1:
        raise ValueError("in a child")
    if number == 2:
        sys.exit("left")
    if number == 3:
        os._exit(7)
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)


def own_run(_):
    print(multiprocessing.process.BaseProcess.run.__qualname__)
    print("__wrapped__" in vars(multiprocessing.process.BaseProcess.run))


def method(name):
    context = multiprocessing.get_context(name)
    for number in range(5):
        process = context.Process(target=work, args=(number,), name=f"child {number}")
        process.start()
        process.join()
        print(number, process.exitcode, flush=True)
    with context.Pool(2) as pool:
        try:
            pool.map(twice, range(5))
        except ValueError as error:
            print(repr(error), type(error.__cause__).__name__, str(error.__cause__))
    with context.Manager() as manager:
        shared = manager.dict(a=1)
        process = context.Process(target=shared.update, args=({"b": 2},))
        process.start()
        process.join()
        print(dict(shared))


def executor(name):
    context = multiprocessing.get_context(name)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        for number in 2, 3:
            future = pool.submit(twice, number)
            print(future.exception() or future.result(), flush=True)
        print(repr(pool.submit(os._exit, 3).exception()))


def shared(_):
    from multiprocessing import shared_memory

    block = shared_memory.SharedMemory(create=True, size=64)
    print(block.size)
    block.close()


def fork(_):
    sys.stdout.flush()
    if not (pid := os.fork()):
        print("child", flush=True)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.stdout.flush()
    if not (pid := os.fork()):
        raise ValueError("in a forked child")
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.stdout.flush()
    if not (pid := os.fork()):
        sys.exit(4)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def exec_chain(rest):
    left = int(rest)
    print(
        left, sys.argv[0] == __file__, sorted(set(os.listdir("/proc/self/fd")) - {"0"}), flush=True
    )
    if left:
        os.execv(sys.executable, [sys.executable, __file__, "exec_chain", str(left - 1)])
    sys.exit(6)


def daemon(_):
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.close(read)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            os.write(write, b"the daemon lives")
            os._exit(0)
        os._exit(0)
    os.close(write)
    os.wait()
    with open(read) as pipe:
        print(pipe.read())


def spawned(_):
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"], os.environ)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def shell(_):
    command = f"{sys.executable} -c 'import sys; print(sys.flags.dev_mode); 1/0'; echo $?"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    print(done)
    done = subprocess.run([sys.executable, "-c", "print(1)"], env={}, capture_output=True)
    print(done.returncode, done.stdout, done.stderr)
    listing = "import os; print(sorted(os.listdir('/proc/self/fd')))"
    for close in True, False:
        command = [sys.executable, "-c", listing]
        print(subprocess.run(command, close_fds=close, capture_output=True, text=True).stdout)


def terminal(_):
    import pty

    sys.stdout.flush()
    status = pty.spawn([sys.executable, "-c", "import os, sys; print(os.isatty(2)); sys.exit(3)"])
    print(os.waitstatus_to_exitcode(status))


def interrupted(_):
    """A parent that gets Ctrl-C while it waits for its child."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        child.wait()
    finally:
        child.terminate()
        print(child.wait(), flush=True)


def interpreters(_):
    if sys.version_info >= (3, 14):
        from concurrent import interpreters

        one = interpreters.create()
        one.exec("import sys; print(sys.excepthook is sys.__excepthook__, flush=True)")
        try:
            one.exec("1 / 0")
        except interpreters.ExecutionFailed as error:
            print(type(error).__name__, str(error))
        one.close()
        return
    import _testcapi

    code = "import sys; print(sys.excepthook is sys.__excepthook__, [type(each) for each in sys.meta_path], flush=True)"
    print(_testcapi.run_in_subinterp(code))
    print(_testcapi.run_in_subinterp("1 / 0"))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
    time.sleep(0)
