"""What compression is worth on your link: measured costs in, step times out.

::

    units        "100 Mbps", "10ms", "124M" as numbers, and numbers for people
    workload     the gradients to exchange: how many, of which shapes, and how long a step takes without
    asked        what an algorithm asks of a cluster, found by running it on a small vector
    moves        how a request is answered: collectives, their bytes, the work beside them, and the memory
    baselines    what is there without this library: DDP's buckets and torch's PowerSGD
    methods      the methods that are planned, and what each does in a step
    costs        a calibration: the seconds that each kind of work takes, and its file
    bench        how work is timed
    echo         a cluster whose other ranks are copies of this one
    cases        the kinds of work that are timed: algorithms, messages, codes, copies
    torch_hooks  the same for DDP and torch's own hooks
    calibrate    all of it on this machine, by as many processes as workers share it
    predict      step times, speed-ups, the best method and the break-even bandwidth
    page         tables and sentences, and a page with speed-ups against bandwidth and workers
"""
