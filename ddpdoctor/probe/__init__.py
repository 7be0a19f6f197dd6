"""What runs inside a rank: hooks that watch, and a recorder that writes.

A guest in somebody else's process. Nothing here raises into the job, blocks it, draws from a
random number generator, synchronizes a device or adds a collective. Of ours it imports
``ddpdoctor.run`` and nothing else; of third parties nothing but the torch of the job.
"""
