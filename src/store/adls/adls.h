/*
 * adls.h - the driver of Azure Data Lake Storage: accounts with a hierarchical namespace, through the dfs endpoint (store.h says what a
 * driver promises).
 *
 *      abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX
 *
 * An object is a file. Every write makes a temporary file `.nebula-tmp-...`, appends to it and flushes it; a rename with a condition makes
 * it the object. Directories come with their first file, and go with their last. Files get the access rights that the default ACL of the
 * directory PREFIX says. Credentials and transport are those of the driver of Azure Blob Storage.
 */
#ifndef NB_STORE_ADLS_ADLS_H
#define NB_STORE_ADLS_ADLS_H

#include "store/store.h"

extern const struct store_ops store_adls;
bool store_adls_takes(const char *url);

#endif
