/*
 * How much to do: the sanitizers make a test five to fifteen times slower, and look harder at what is
 * done at all.
 */
#ifndef EBB_SCALE_H
#define EBB_SCALE_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

/* `full` times a plain build, `some` times one with sanitizers. */
#define SCALED(full, some) (SANITIZED ? (some) : (full))

#endif
