"""Code that runs inside a rank: hooks and observers, and a recorder that writes.

Nothing here raises into the job, blocks it, draws from a random number generator, synchronizes a
device or adds a collective. It imports only ``ddpdoctor.run``, ``ddpdoctor.core`` and the torch of
the job.
"""
