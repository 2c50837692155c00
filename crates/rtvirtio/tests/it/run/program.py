"""Forks and threads, with direct and buffered files, pipes and a subprocess."""

import mmap
import multiprocessing
import os
import subprocess
import sys
import threading

PAGE = 4096
PAGES = 64


def read_pages(fd):
    with mmap.mmap(-1, PAGE) as buffer:
        for page in range(PAGES):
            assert os.preadv(fd, [buffer], page * PAGE) == PAGE
            assert buffer[:] == bytes([page]) * PAGE, page


def child(fd, pipe):
    read_pages(fd)
    pipe.send("read")


def main():
    with open("pages", "wb") as file:
        for page in range(PAGES):
            file.write(bytes([page]) * PAGE)
    fd = os.open("pages", os.O_RDONLY | os.O_DIRECT)
    read_pages(fd)

    threads = [threading.Thread(target=read_pages, args=(fd,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    forking = multiprocessing.get_context("fork")
    for _ in range(5):
        ours, theirs = forking.Pipe()
        process = forking.Process(target=child, args=(fd, theirs))
        process.start()
        assert ours.recv() == "read"
        process.join()
        assert process.exitcode == 0
        said = subprocess.run(["cat"], input=b"through", stdout=subprocess.PIPE, check=True)
        assert said.stdout == b"through"
    for thread in threads:
        thread.join()

    with open("pages", "rb") as file:
        assert os.pread(file.fileno(), 3, PAGE - 1) == bytes([0, 1, 1])
    try:
        os.pread(os.pipe()[0], 1, 0)
        sys.exit("a pipe has offsets")
    except OSError as error:
        assert error.errno == 29, error
    print("all right")


main()
