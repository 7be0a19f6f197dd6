import sys

# From 3.14 on, Python imports it to print a traceback, unless ddpdoctor had to load its own.
if sys.version_info < (3, 14):
    print("the dataclasses of the job is imported")
