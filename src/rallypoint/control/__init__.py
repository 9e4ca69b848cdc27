"""Running jobs: finding them on this host, and asking their supervisors.

Each supervisor serves a Unix socket in a folder that only its user can enter. Nothing more is done until a client asks.

    from rallypoint.launch import connect

    job = connect()                       # the only job, or connect("its id")
    for worker in job.status()["workers"]:
        print(worker["rank"], worker["pid"], worker["state"])
"""
