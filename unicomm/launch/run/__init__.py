"""`unicomm run`: torchrun, with a folder for rings, a hub, and a verdict when ranks fail.

launcher.py      torchrun's parser and launcher with our options: addresses, environment, the end of the job
agent.py         torchrun's agent, which tells the job when ranks start, fail and end
job.py           this host's part of a job: its rings and its hub, and how an attempt failed
introduction.py  how the hubs of a job's hosts find each other
job_folder.py    the folders of a job on this host, and the notes that say where its hub listens
memory_kills.py  evidence that the kernel killed a rank for want of memory
stop_signals.py  signals that tell the launcher to stop
outcome.py       how the job ended, and the exit code
summary.py       the verdict that is printed when ranks have failed
verdict_file.py  the verdict as JSON
lasting_stderr.py  stderr whose reader may go before the job ends
time_limit.py    a time limit for the verdict
"""
