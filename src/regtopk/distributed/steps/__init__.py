"""What a step consists of: ranks agree, the algorithm runs, the step is counted or taken back.

::

    step.py             Steps, and one of them: a `with` block
    agreement.py        do all ranks exchange the same, and is all of it finite?
    driver.py           runs the algorithm, and passes on what it asks
    alike.py            vectors of one kind, computed together
    handshake.py        what ranks compare before the first step
    base.py             what every kind of exchange offers its users
    attached.py         what must not meet: two exchanges, or two momenta
"""
