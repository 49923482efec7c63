"""Offline bundles: everything that a host without a network needs, in parts of a chosen size.

pack(workspace, options)   write parts, `manifest.json` and `install.py` (`samebits.bundle.pack`)
install.py                 verify and install on the host; standard library only

A bundle has groups, and every part belongs to one group. `project` (this package, its patches,
cases and patched trees) and `core` go to every host; the others are more wheels of
`scripts/bundle.lock`, compiled extensions of `patches/compiled.yaml`, and the weights of a case.
"""
