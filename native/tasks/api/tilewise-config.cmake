# find_package(tilewise CONFIG) for C and C++ programs on the task runtime:
#   cmake -Dtilewise_DIR=$(python -c "import tilewise; print(tilewise.get_cmake_dir())")
#   target_link_libraries(my_program PRIVATE tilewise::pto)  # or tilewise::tile, with tile calls
get_filename_component(_tilewise_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT TARGET tilewise::pto)
  add_library(tilewise::pto SHARED IMPORTED)
  set_target_properties(tilewise::pto PROPERTIES
                        IMPORTED_LOCATION "${_tilewise_root}/lib/libtilewise_pto.so"
                        INTERFACE_INCLUDE_DIRECTORIES "${_tilewise_root}/include")
endif()
if(NOT TARGET tilewise::tile)
  add_library(tilewise::tile SHARED IMPORTED)
  set_target_properties(tilewise::tile PROPERTIES
                        IMPORTED_LOCATION "${_tilewise_root}/lib/libtilewise_tile.so"
                        INTERFACE_LINK_LIBRARIES tilewise::pto)
endif()
unset(_tilewise_root)
