import sys

print("the job's sitecustomize:", sys.argv, __name__, "site_prints" in __file__, flush=True)
sys.excepthook = lambda kind, error, trace: print("the site's hook:", kind.__name__, error)
