"""`unicomm run`: torchrun, with a folder for rings, a hub, and a verdict when ranks fail.

launcher.py    torchrun's parser and launcher with our options: addresses, environment, exit code
job.py         this host's part of a job: torchrun's agent tells it when ranks start, fail and end
job_folder.py  the folders of a job on this host, and the notes that say where its hub listens
summary.py     the verdict that is printed when ranks have failed
"""
