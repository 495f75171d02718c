"""A server and the clients that it samples: import from the modules, none is imported for you.

::

    app.py        SparseMod and SparseFedAvg: the two in Flower's apps
    client.py     Client: what it trains on, sends and remembers; which algorithms it can run
    server.py     Server: the model, and what each client has of it
    messages.py   what they tell each other; none of these three knows how it travels
"""
