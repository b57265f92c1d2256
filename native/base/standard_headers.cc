// Empty: its target holds the precompiled standard headers (CMakeLists.txt).
