import sys

print("dataclasses" in sys.modules, "re" in sys.modules)
raise ValueError("the end")
