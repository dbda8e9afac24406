"""What NCCL (or RCCL) logs under NCCL_DEBUG=INFO: which ranks talk to which, and over what.

One pass over the file. Lines of several processes may be mixed: each begins with host:pid:tid. Most
lines do not name their communicator: then the thread that initialises one, or the rank, decides.
"""
