"""What compression is worth on your link: measured costs in, step times out.

::

    units      "100 Mbps", "10ms", "124M" as numbers
    workload   the gradients to exchange: how many, of which shapes, and how long a step takes without
    rounds     what each method asks of the cluster, and the sizes of its messages
    network    how long a collective takes on a link
    calibrate  what selecting, coding and moving bytes costs on this machine, measured
    cache      calibrations on disk
    predict    step times, speed-ups, the best method and the break-even bandwidth
    page       the same as a recorded run: speed-up against bandwidth and against workers
"""
