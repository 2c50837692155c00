#!/usr/bin/env python3
"""Stands where QEMU's tests look for qemu-storage-daemon, and starts `rtvirtio serve` with the same disks.

The program is $RTVIRTIO. Of the storage daemon's options it knows what tests/qtest/vhost-user-blk-test.c passes:
files as block devices, and vhost-user-blk exports that listen on an inherited descriptor. What it does not know
ends it with a message, so that no test passes on a disk other than the one it asked for.
"""

import json
import os
import sys
import tempfile

FIRST = 3  # SD_LISTEN_FDS_START of sd_listen_fds(3)


def options(text, known):
    """The options of one argument, `key=value,…`."""
    found = dict(part.split("=", 1) for part in text.split(","))
    if unknown := set(found) - known:
        sys.exit(f"storage-daemon.py: unknown options: {', '.join(sorted(unknown))}")
    return found


def parse(arguments):
    """Paths of the block devices by their node names, and the exports."""
    nodes, exports = {}, []
    pairs = iter(arguments)
    for option in pairs:
        value = next(pairs, "")
        if option == "--blockdev":
            node = options(value, {"driver", "node-name", "filename"})
            if node["driver"] != "file":
                sys.exit(f"storage-daemon.py: unknown driver: {node['driver']}")
            nodes[node["node-name"]] = os.path.abspath(node["filename"])
        elif option == "--export":
            known = {"type", "id", "addr.type", "addr.str", "node-name", "writable", "num-queues"}
            export = options(value, known)
            if (export["type"], export["addr.type"]) != ("vhost-user-blk", "fd"):
                sys.exit(f"storage-daemon.py: unknown export: {value}")
            exports.append(export)
        else:
            sys.exit(f"storage-daemon.py: unknown option: {option}")
    return nodes, exports


def device(export, nodes):
    """A device of serve.toml."""
    lines = [
        "[[device]]",
        f'name = "{export["id"]}"',
        'vm = "test"',
        f'socket_activation = "{export["id"]}"',
        f"queues = {export['num-queues']}",
        f'engine = {{ type = "file", path = {json.dumps(nodes[export["node-name"]])} }}',
    ]
    if export.get("writable") != "on":
        lines.append("read_only = true")
    return "\n".join(lines)


def main():
    nodes, exports = parse(sys.argv[1:])
    configuration = "version = 1\n[service]\nsandbox = false\n[[iothread]]\nname = \"iot0\"\n"
    configuration += "\n".join(device(export, nodes) for export in exports)
    handle, path = tempfile.mkstemp(suffix=".toml")
    with os.fdopen(handle, "w") as file:
        file.write(configuration)
    # Out of the way first: the places from FIRST on may be taken by the descriptors themselves.
    aside = [os.dup(int(export["addr.str"])) for export in exports]
    aside = [os.dup2(fd, 200 + place) for place, fd in enumerate(aside)]
    for place, fd in enumerate(aside):
        os.dup2(fd, FIRST + place, inheritable=True)
    os.environ.update(
        LISTEN_PID=str(os.getpid()),
        LISTEN_FDS=str(len(exports)),
        LISTEN_FDNAMES=":".join(export["id"] for export in exports),
    )
    program = os.environ["RTVIRTIO"]
    os.execv(program, [program, "serve", path])


main()
