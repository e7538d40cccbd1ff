/*
 * azure.h - the driver of Azure Blob Storage (store.h says what a driver promises).
 *
 *      az://ACCOUNT/CONTAINER/PREFIX
 *      https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX, also with a SAS after '?'
 *      http://127.0.0.1:10000/ACCOUNT/CONTAINER/PREFIX, an emulator
 *
 * An object is a block blob with the name PREFIX/key. A small one takes one Put Blob. A large one takes blocks, which Azure does not
 * show, and one Put Block List, which makes all of them the blob at once. Azure drops blocks that no list names within a week. Every
 * write stores an id of its own in the blob's metadata (x-ms-meta-nebula). If an answer is lost, the driver recognizes its write by that
 * id. A stamp is an ETag.
 *
 * docs/storage.md lists the credentials and their order.
 */
#ifndef NB_STORE_AZURE_AZURE_H
#define NB_STORE_AZURE_AZURE_H

#include "store/store.h"

extern const struct store_ops store_azure;
bool store_azure_takes(const char *url);
/* The URL of one of several accounts, with commas between their names. `rest`: what follows the account in an az:// URL. The endpoint of
 * AZURE_STORAGE_CONNECTION_STRING, if it is for one of the accounts, is used for all of them. NULL: no memory. */
char *azure_url_beside(const char *account, const char *accounts, const char *rest);

#endif
