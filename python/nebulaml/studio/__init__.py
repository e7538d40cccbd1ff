"""``nebula studio``: one page that shows a job and its checkpoints, served on loopback. Needs the extra ``studio``: Starlette and uvicorn.

source.py asks the C command, snapshot.py makes one document of the answers, collector.py keeps it up to date, works.py runs what takes long,
fleet.py has all of this for each job, and server.py serves it.
"""
