# The Python package: build/<preset>/python/ebbtide holds the extension, the simulated GPU and links
# to the Python files, so that PYTHONPATH=build/<preset>/python is a working installation of this
# clone. scikit-build-core makes the wheel from the same targets.

set(package ${CMAKE_BINARY_DIR}/python/ebbtide)
set(natives "")
if(TARGET ebbtide_sim)
    list(APPEND natives ebbtide_sim)
endif()

if(EBB_PYTHON)
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
    add_library(_core MODULE python/ebbtide/_core.c python/ebbtide/_core_ahead.c
                python/ebbtide/_core_attach.c python/ebbtide/_core_course.c
                python/ebbtide/_core_device.c
                python/ebbtide/_core_gate.c python/ebbtide/_core_load.c python/ebbtide/_core_mover.c
                python/ebbtide/_core_pass.c python/ebbtide/_core_places.c
                python/ebbtide/_core_spots.c python/ebbtide/_core_unit.c
                python/ebbtide/_core_unit_pins.c python/ebbtide/_core_unit_places.c
                python/ebbtide/_core_vbar.c python/ebbtide/_core_weight.c)
    target_compile_definitions(_core PRIVATE Py_LIMITED_API=0x030A0000)
    # System headers: Python's own do not pass our warnings.
    target_include_directories(_core SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
    target_link_libraries(_core PRIVATE ebbtide_core)
    set_target_properties(_core PROPERTIES PREFIX "" SUFFIX .abi3.so)
    list(APPEND natives _core)

    # Beside the simulated GPU, which it is linked against.
    add_library(_sim MODULE python/ebbtide/_seen.c python/ebbtide/_sim.c python/ebbtide/_tensors.c)
    target_compile_definitions(_sim PRIVATE Py_LIMITED_API=0x030A0000)
    target_include_directories(_sim SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
    target_link_libraries(_sim PRIVATE ebbtide_sim)
    set_target_properties(_sim PROPERTIES PREFIX "" SUFFIX .abi3.so BUILD_RPATH "$ORIGIN"
                          INSTALL_RPATH "$ORIGIN")
    list(APPEND natives _sim)
endif()

if(natives)
    set_target_properties(${natives} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package})
endif()

if(SKBUILD)
    install(TARGETS ${natives} LIBRARY DESTINATION ebbtide)
else()
    file(MAKE_DIRECTORY ${package})
    file(GLOB entries CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/python/ebbtide/*)
    foreach(entry IN LISTS entries)
        get_filename_component(name ${entry} NAME)
        if(NOT name MATCHES "\\.[ch]$|\\.so$|^__pycache__$")
            file(CREATE_LINK ${entry} ${package}/${name} SYMBOLIC)
        endif()
    endforeach()
endif()
