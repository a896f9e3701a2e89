"""``omlx doctor``: what stands in the way of a server here, what would slow it, what to do.

Each module imports only those above it:

    finding   what a check has to say
    facts     what is known of this machine, as numbers and words
    checks, disk_checks   facts to findings: pure, and where every judgement is made
    probes    thin: read the machine, the settings, the model's folder, the port
    disk      thin: the cache folder, measured with a file that is gone at once
    child     a process of its own that imports MLX, so that a broken one breaks nothing else
    report    findings as text and as JSON
    run       all of it in order

It changes nothing that stays: no folder, no file, no setting.
"""
