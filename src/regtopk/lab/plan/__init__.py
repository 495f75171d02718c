"""What compression is worth on your link: measured costs in, step times out.

::

    units        "100 Mbps", "10ms", "124M" as numbers, and numbers for people
    workload     the gradients or updates to exchange, and how long a step takes without exchanging them
    asked        what an algorithm asks of a cluster, found by running it on a small vector
    exchange     what a request takes of a worker: work, collectives, bytes and memory
    methods      the methods that are planned, and what each does in a step
    costs        a calibration: the seconds that each kind of work takes, and its file
    bench        how work is timed
    cases        the work that a calibration times: this library's, that of torch's hooks, gloo's collectives
    calibrate    all of it on this machine, by as many processes as workers share it
    predict      step times, the best method and the break-even bandwidth
    page         the table, the answer in words and in code, and a page with speed-ups
"""
