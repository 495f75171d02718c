"""What compression is worth on your link: measured costs in, step times out.

::

    units        "100 Mbps", "10ms", "124M" as numbers, and numbers for people
    link         what is assumed of a link: how long collectives take on it, and what hides behind computation
    methods      the methods that are planned, and the words they are asked for with
    exchange     what a method asks of a worker in a step of a model: work, collectives and bytes
    costs        a calibration: the seconds that each unit of work takes, and its file
    calibrate    what is measured on this machine: passes, selection, coding, hooks, collectives
    learning     how many steps a method needs to a loss, as our records say
    predict      step times, the best method and the break-even bandwidth
    page         the table, the answer in words and in code, and a page of speed-ups
"""
