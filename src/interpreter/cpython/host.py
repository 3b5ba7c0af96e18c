"""Tells where this Python lies: run once, with the user's rights, before anything is confined."""
"""Reports where this Python is installed. Runs once, with the user's rights, before anything is confined."""
import json
import os
import sys

with open("/proc/self/maps") as maps:
    fields = [line.rstrip("\n").split(None, 5) for line in maps]
mapped = sorted({f[5] for f in fields if len(f) == 6 and f[5].startswith("/")})
libraries = [path for path in mapped if ".so" in os.path.basename(path)]
loaders = [path for path in libraries if os.path.basename(path).startswith(("ld-", "ld.", "ld64"))]
roots = sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, "/usr"})
# An editable install links a folder of the user, which may be the project itself. Such a folder stays out of
# reach.
folders = [path for path in sys.path if any(path.startswith(root + "/") for root in roots)]
# A library outside the usual folders is allowed alone, because its folder may hold anything.
libraries_roots = (*roots, "/lib", "/lib64")
read = list(folders)
for path in libraries:
    inside = any(path.startswith(root + "/") for root in libraries_roots)
    read.append(os.path.dirname(path) if inside else path)
read += [os.path.join(sys.prefix, "pyvenv.cfg"), "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null"]
print(
    json.dumps(
        {
            "executable": sys.executable,
            "read": sorted({path for path in read if os.path.exists(path)}),
            "execute": sorted({os.path.realpath(sys.executable), *loaders}),
            "paths": sorted({*folders, *(r for r in roots if r != "/usr")}, key=len, reverse=True),
        }
    )
)
