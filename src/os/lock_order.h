/*
 * lock_order.h - every mutex of Nebula, in the order in which a thread may take them.
 *
 * A thread that holds a lock takes only locks that stand below it. Two locks of one name are never held together, with one
 * exception: lock_take_beside (lock.h). To try a lock is free of the order, because a try does not wait.
 *
 * Builds with tests check each acquisition (lock.h). A new lock is added here, where it fits.
 */
#ifndef NB_OS_LOCK_ORDER_H
#define NB_OS_LOCK_ORDER_H

#define LOCK_ORDER(LOCK) \
        /* the command */ \
        LOCK(LOCK_RESTORE)       /* cli/cmd_restore.c: the file that a signal would remove */ \
        LOCK(LOCK_METRICS)       /* cli/metrics.c: what was read from storage last */ \
        /* the client */ \
        LOCK(LOCK_REQUEST)       /* client.h, request_lock: one request of a session after the other */ \
        LOCK(LOCK_SESSIONS)      /* client/session.c: the list of sessions; held during a fork */ \
        LOCK(LOCK_SETTINGS)      /* client.h, settings_lock: of a session */ \
        LOCK(LOCK_WATCH)         /* client/watch.c: the connection on which a watch waits */ \
        LOCK(LOCK_WIRES)         /* client/wire.c: the list of connections; held during a fork */ \
        LOCK(LOCK_COPIES)        /* client.h, copies_lock: running copies of a session */ \
        LOCK(LOCK_SPARES)        /* client.h, spares_lock: the image that a thread makes ready for a save */ \
        /* capture */ \
        LOCK(LOCK_ENGINE)        /* capture/cow_engine.c: the process's engine; held during a fork */ \
        LOCK(LOCK_START)         /* cow_private.h, start_lock: one start of a capture after the other */ \
        LOCK(LOCK_BLOCKS)        /* cow_private.h, blocks_lock: live captures and their blocks */ \
        LOCK(LOCK_HUGE)          /* cow_private.h, huge_lock: pages to join */ \
        LOCK(LOCK_TURN)          /* capture/copy.c: one capture after the other */ \
        LOCK(LOCK_CREW)          /* capture/copy.c: the copying threads and their job */ \
        /* the agent */ \
        LOCK(LOCK_PEER_COPIES)   /* replica_private.h, peer_copies_lock: the copies of other nodes; held while they are asked */ \
        LOCK(LOCK_COPY_SERVER)   /* copy_server_private.h: the copies that this node holds for others */ \
        LOCK(LOCK_SEAL)          /* agent/persist/persist_seal.c: seals one image at a time */ \
        LOCK(LOCK_CATALOGUE)     /* catalogue.h, catalogue_lock: the agent's catalogue */ \
        LOCK(LOCK_MEMORY_FILES)  /* memory_files.h, writer_lock: writes one task at a time */ \
        LOCK(LOCK_OWN_MEMBER)    /* replica_private.h, own_lock: this node's member document */ \
        /* storage */ \
        LOCK(LOCK_VERIFY)        /* store/verify.c: the chunks still to be checked */ \
        LOCK(LOCK_TRUST)         /* store/trust.h: the signature that was read last */ \
        LOCK(LOCK_STORE_COUNTS)  /* store/counts.c: the kinds of stores that are counted */ \
        LOCK(LOCK_STORE_CLOCK)   /* store_file_private.h: the time of a file system; held while a file is made to read it */ \
        LOCK(LOCK_STORE_DIRS)    /* store/store_file_dirs.c: the directories known to be durable */ \
        LOCK(LOCK_STORE_VOLUMES) /* tests/doubles: the volumes of the driver `mem` */ \
        LOCK(LOCK_STORE_MEM)     /* tests/doubles: the objects of one volume */ \
        LOCK(LOCK_OBJECT_STORE)  /* azure_private.h, s3_private.h: the credential of a store, found once */ \
        LOCK(LOCK_STORE_PLACES)  /* store/place.c: the signatures of storage paths */ \
        LOCK(LOCK_OBJECT_TOKENS) /* store/object/object_token.c: the list of tokens */ \
        LOCK(LOCK_OBJECT_TOKEN)  /* store/object/object_token.c: one token */ \
        LOCK(LOCK_OBJECT_PARTS)  /* store/object/object_parts.c: parts that no thread has taken */ \
        LOCK(LOCK_OBJECT_TOUCH)  /* store/object/object_touch.c: whether an upload is over */ \
        LOCK(LOCK_LANES)         /* store/lanes.c: the result of one job */ \
        LOCK(LOCK_HTTP_HOSTS)    /* store/http/http_host.c: the running requests per host */ \
        LOCK(LOCK_HTTP_POOL)     /* store/http/http_pool.c: idle connections */ \
        LOCK(LOCK_HTTP_SHARED)   /* store/http/http_pool.c: data that libcurl shares between connections */ \
        LOCK(LOCK_HTTP_NAMES)    /* store/http/http_pool.c: addresses of hosts */ \
        LOCK(LOCK_HTTP_SESSIONS) /* store/http/http_pool.c: TLS sessions */ \
        LOCK(LOCK_PROGRESS)      /* cli/term.c: the line that shows progress */ \
        /* bulk I/O */ \
        LOCK(LOCK_FEED)          /* bulk.h: which bytes of a file are final */ \
        LOCK(LOCK_BULK_RESULT)   /* bulk_private.h: the result of one call */ \
        LOCK(LOCK_PINNED)        /* os/bulk_ring.c: memory that a ring has registered */ \
        LOCK(LOCK_RING_QUEUE)    /* os/bulk_ring.c: completed requests */ \
        /* taken anywhere */ \
        LOCK(LOCK_ENDING)        /* os/ending.c: the handlers for the end of the process */ \
        LOCK(LOCK_CRASH_LOG)     /* os/os_crash.c: the log of a test's calls */

#define LOCK_RANK(name) name,
enum lock_rank { LOCK_ORDER(LOCK_RANK) };
#undef LOCK_RANK

/* The agent's clients wait for this lock: a file operation on a hanging disk would stop them all. */
#define LOCK_FORBIDS_FILES(rank) ((rank) == LOCK_CATALOGUE)

#endif
