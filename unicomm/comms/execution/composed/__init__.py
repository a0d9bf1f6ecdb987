"""Collectives made of messages, for backends that lack them; wire formats and checksums of any collective.

completion.py   collectives that a backend lacks, composed from exchanges of messages
exchanges.py    exchanges of messages, also of those that travel while their rank computes
encoded.py      collectives whose elements travel in a wire format
checksums.py    checksums of what operations read and write, and their comparison between ranks
"""
