# ebb_test(<name> LABEL <home> SOURCES <file>... [LIBRARIES <target>...] [ENVIRONMENT <A=b>...]
#          [TIMEOUT <seconds>] [ARGUMENTS <argument>...])
#
# A C test program: one topic, one program, exit code 0 passed, 77 skipped, anything else failed.

function(ebb_test name)
    cmake_parse_arguments(PARSE_ARGV 1 test "" "LABEL;TIMEOUT"
                          "SOURCES;LIBRARIES;ENVIRONMENT;ARGUMENTS")
    if(NOT test_TIMEOUT)
        set(test_TIMEOUT 120)
    endif()
    add_executable(${name} ${test_SOURCES})
    target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
    target_link_libraries(${name} PRIVATE ebbtide_core ${test_LIBRARIES})
    add_test(NAME ${name} COMMAND ${name} ${test_ARGUMENTS})
    set_tests_properties(${name} PROPERTIES LABELS ${test_LABEL} SKIP_RETURN_CODE 77
                         TIMEOUT ${test_TIMEOUT} ENVIRONMENT "${test_ENVIRONMENT}")
endfunction()
