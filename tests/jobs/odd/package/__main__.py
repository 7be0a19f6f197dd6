import sys

print(
    __name__, __package__, __spec__ and __spec__.name, sys.argv[1:], sys.path[0].rpartition("/")[2]
)
raise ValueError("of a package")
